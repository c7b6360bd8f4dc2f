"""The paper's counting of a ResNet under SLT, written out by hand: no graph, no export, nothing of Strata.

A second opinion for the search, and for the costs room once it counts the same networks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

BLOCKS = {"ResNet20": 3, "ResNet44": 7, "ResNet56": 9}


@dataclass(frozen=True)
class PaperResNet:
    blocks: int
    image_size: int
    classes: int
    batch: int = 32

    @property
    def depth(self) -> int:
        return 6 * self.blocks + 1

    def counts(self, k_frozen: int, k_trained: int, scale: float) -> tuple[int, int, int]:
        """(activation floats per sample that need grad, parameters, trained parameters)"""
        activations = parameters = trained = 0

        def width(layer: int, channels: int) -> int:
            return channels if layer <= k_trained else max(1, floor(scale * channels))

        def convolution(layer: int, inputs: int, outputs: int) -> None:
            nonlocal parameters, trained
            size = 9 * inputs * outputs + 2 * outputs  # kernel, norm weight and bias
            parameters += size
            trained += size * (layer > k_frozen)

        side = self.image_size
        stream = width(1, 16)
        convolution(1, 3, stream)
        grad = k_frozen < 1  # does the value on the residual stream need a gradient?
        activations += 3 * stream * side**2 * grad  # conv, norm, relu
        layer = 1
        for channels in (16, 32, 64):
            for block in range(self.blocks):
                stride = 2 if channels > 16 and block == 0 else 1
                side //= stride
                first, second = layer + 1, layer + 2
                inner, outer = width(first, channels), width(second, channels)
                convolution(first, stream, inner)
                convolution(second, inner, outer)
                grad_inner = k_frozen < first
                grad_outer = k_frozen < second
                activations += 3 * inner * side**2 * grad_inner + 2 * outer * side**2 * grad_outer
                if stride == 2:  # the projection belongs to the deeper layer
                    convolution(second, stream, outer)
                    activations += 2 * outer * side**2 * grad_outer
                    joined = outer
                else:
                    joined = min(stream, outer)
                    activations += joined * side**2 * grad  # the identity hands on what the addition will take
                grad = grad or grad_outer
                activations += 2 * joined * side**2 * grad  # add, relu
                stream, layer = joined, second
        features = stream * (side // 4) ** 2
        activations += 2 * features * grad + self.classes  # pool, flatten, classifier
        classifier = features * self.classes + self.classes
        return activations, parameters + classifier, trained + classifier

    def memory(self, k_frozen: int, k_trained: int, scale: float) -> int:
        activations, parameters, trained = self.counts(k_frozen, k_trained, scale)
        return 4 * (self.batch * activations + parameters + trained)

    def trained_parameters(self, k_frozen: int, k_trained: int, scale: float) -> int:
        return self.counts(k_frozen, k_trained, scale)[2]


def paper_resnet(name: str) -> PaperResNet:
    return PaperResNet(BLOCKS[name], *{"ResNet20": (32, 10), "ResNet44": (64, 200), "ResNet56": (64, 1000)}[name])
