"""Plain networks: no federated code in them."""

from strata.models.densenet import densenet40
from strata.models.resnet import resnet20, resnet44, resnet56

__all__ = ["densenet40", "resnet20", "resnet44", "resnet56"]
