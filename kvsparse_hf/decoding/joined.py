"""Projections of one input (q/k/v, gate/up) as one product, without a second copy of their weights.

The weights of a group are laid one behind the other in memory, and each parameter becomes its part of that. A graph in which
they multiply the same input then reads all of them at once: one launch instead of two or three, and one that is large enough to
use the memory's bandwidth where a few rows are decoded.
"""

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def join_weights(model: nn.Module) -> int:
    """Moves the weights (and biases) of every group of plain linear layers of one module next to each other, in place.

    Parameters stay what they are, to optimizers, `state_dict` and `save_pretrained`. Layers of another type (quantized, with
    adapters) and weights that are not here as plain tensors (divided among ranks, offloaded) are left alone.

    Returns:
        How many groups lie together.
    """
    groups = list(_groups(model))
    for layers in groups:
        for part in ("weight", "bias"):
            parameters = [getattr(layer, part) for layer in layers]
            if parameters[0] is not None and not side_by_side(parameters):
                _lay_together(parameters)
    return len(groups)


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    for module in model.modules():
        for names in GROUPS:
            layers = [getattr(module, name, None) for name in names]
            if all(_is_plain(layer) for layer in layers) and len({_kind(layer) for layer in layers}) == 1:
                yield layers


def _is_plain(layer: nn.Module | None) -> bool:
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not layer.weight.is_meta


def _kind(layer: nn.Linear) -> tuple:
    weight, bias = layer.weight, layer.bias
    return layer.in_features, weight.dtype, weight.device, None if bias is None else (bias.dtype, bias.device)


def _lay_together(parameters: Sequence[nn.Parameter]) -> None:
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part


def side_by_side(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors follow each other in one storage, from its beginning."""
    storage, at = tensors[0].untyped_storage()._cdata, 0
    for tensor in tensors:
        if tensor.untyped_storage()._cdata != storage or tensor.storage_offset() != at or not tensor.is_contiguous():
            return False
        at += tensor.numel()
    return True


class JoinProjections(CustomGraphPass):
    """A pass over Dynamo's graph: linear layers of one input whose weights lie side by side become one."""

    def __call__(self, graph: fx.Graph) -> None:
        by_input: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if node.op == "call_function" and node.target is torch._C._nn.linear and len(node.args) == 3 and not node.kwargs:
                if node.args[1].op == "placeholder":
                    by_input[node.args[0]].append(node)
        for found in by_input.values():
            products = sorted(found, key=lambda node: _value(node.args[1]).storage_offset())
            if len(products) > 1 and _together(products):
                _join(graph, products, before=found[0])
        graph.lint()

    def uuid(self) -> bytes:
        """For Inductor's caches; another number when the pass does something else."""
        return b"kvsparse_hf.decoding.joined 1"


def _value(node: fx.Node) -> Tensor:
    return node.meta["example_value"]


def _together(products: list[fx.Node]) -> bool:
    weights, biases = ([node.args[at] for node in products] for at in (1, 2))
    if not side_by_side([_value(weight) for weight in weights]):
        return False
    if all(bias is None for bias in biases):
        return True
    given = all(isinstance(bias, fx.Node) and bias.op == "placeholder" for bias in biases)
    return given and side_by_side([_value(bias) for bias in biases])


def _join(graph: fx.Graph, products: list[fx.Node], before: fx.Node) -> None:
    widths = [len(_value(node.args[1])) for node in products]
    inner = _value(products[0].args[1]).shape[1]
    with graph.inserting_before(before):
        weight = _whole(graph, products[0].args[1], (sum(widths), inner), (inner, 1))
        bias = products[0].args[2] and _whole(graph, products[0].args[2], (sum(widths),), (1,))
        product = graph.call_function(torch._C._nn.linear, (products[0].args[0], weight, bias))
        parts = graph.call_function(torch.split, (product, widths, -1))
        for at, node in enumerate(products):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (parts, at)))
    for node in products:
        graph.erase_node(node)


def _whole(graph: fx.Graph, first: fx.Node, shape: tuple[int, ...], stride: tuple[int, ...]) -> fx.Node:
    return graph.call_function(torch.as_strided, (first, shape, stride, 0))
