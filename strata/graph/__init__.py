"""Cut any PyTorch model: find which channels hang together, take a part out, put it back."""

from strata.graph.cut import Cut
from strata.graph.graph import ChannelGraph
from strata.graph.inputs import Input, InputSpec
from strata.graph.propagation import Pinned
from strata.graph.rows import floor_of
from strata.graph.submodel import SubModel
from strata.ops.sized import Ref, SizedOp

__all__ = ["ChannelGraph", "Cut", "Input", "InputSpec", "Pinned", "Ref", "SizedOp", "SubModel", "floor_of"]
