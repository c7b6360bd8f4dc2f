"""Cut any PyTorch model: find which channels hang together, take a part out, put it back."""

from strata.cutting.cut import Cut
from strata.cutting.graph import ChannelGraph
from strata.cutting.propagation import Pinned
from strata.cutting.rows import floor_of
from strata.cutting.sized import Ref, SizedOp
from strata.cutting.submodel import SubModel

__all__ = ["ChannelGraph", "Cut", "Pinned", "Ref", "SizedOp", "SubModel", "floor_of"]
