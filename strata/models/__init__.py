"""Plain networks: no federated code in them."""

from strata.models.densenet import densenet40
from strata.models.resnet import resnet20, resnet44, resnet56
from strata.models.resnet18 import resnet18, resnet18_gn

__all__ = ["densenet40", "resnet18", "resnet18_gn", "resnet20", "resnet44", "resnet56"]
