"""Which layers choose the entries that decode steps read, where several layers read by one choice.

See ``Retrieve.reuse_layers``.
"""

from vllm_kvx.policy.axes import DENSE_LAYERS


def layer_chooses(layer: int, reuse_layers: int, first: int = 0) -> bool:
    """Whether a layer makes the choice that it reads by, where so many read by one.

    first: of a pipeline's rank, whose first one has nobody's choice to go by.
    """
    above = layer - DENSE_LAYERS
    return above >= 0 and (above % reuse_layers == 0 or layer == max(first, DENSE_LAYERS))


def share_that_chooses(num_layers: int, reuse_layers: int) -> float:
    """The share of a model's layers that retrieve which choose; 1 where each does.

    Of all ranks of a pipeline alike, though the first layer of each chooses too.
    """
    retrieving = range(DENSE_LAYERS, num_layers)
    if not retrieving:
        return 1.0
    return sum(layer_chooses(layer, reuse_layers) for layer in retrieving) / len(retrieving)
