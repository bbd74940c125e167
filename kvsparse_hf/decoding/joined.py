"""Products of a step: projections of one input (q/k/v, gate/up) as one, without a second copy of their weights, and products of
a few rows by a kernel of ours.

The weights of a group are laid one behind the other in memory, and each parameter becomes its part of that. A graph in which
they multiply the same input then reads all of them at once: one launch instead of two or three, and one that is large enough to
use the memory's bandwidth where a few rows are decoded.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..ops.reference import MOST_ROWS
from .compiled import TUNING
from .launches import compile_ordered

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


@dataclass(frozen=True)
class _Whole:
    """What a joined product multiplies with: the memory that begins with input ``first`` of the graph."""

    first: int
    shape: tuple[int, ...]

    def of(self, inputs: Sequence[Tensor]) -> Tensor:
        return inputs[self.first].as_strided(self.shape, (*self.shape[1:], 1), 0)


def compile_products(module: fx.GraphModule, inputs: Sequence[Tensor], options: dict, join: bool) -> Callable:
    """A backend of `torch.compile`: Inductor. With ``join``, for a graph whose linear layers of one input are one where their
    weights lie side by side.

    The joined weights become further inputs of the graph, views that each call takes of the first weight of their group: a view
    taken inside, which is larger than the input it is taken of, is more than Inductor's tuning expects.

    Where our own kernel multiplies every one of a few rows, nothing is tuned: what is left for Inductor, norms and activations,
    takes less time than its launch, and a choice by timing would be left to chance (norms of 8 rows on an H200: 2 to 3.5 µs by
    its default, up to 14.9 tuned).
    """
    wholes: list[_Whole] = []
    if join and _all_few_rows(module.graph):
        options = {name: value for name, value in options.items() if name not in TUNING}

    def build() -> tuple[fx.GraphModule, list[Tensor]]:
        graph = fx.Graph()  # Dynamo still reads its own
        graph.output(graph.graph_copy(module.graph, {}))
        wholes[:] = _join_products(graph) if join else []
        return fx.GraphModule(module, graph), [*inputs, *(whole.of(inputs) for whole in wholes)]

    compiled = compile_ordered(build, options)
    return lambda *inputs: compiled(*inputs, *(whole.of(inputs) for whole in wholes))


def _join_products(graph: fx.Graph) -> list[_Whole]:
    """Changes the graph; its new inputs, in order."""
    by_input: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in _linear_layers(graph):
        if _is_understood(node):
            by_input[node.args[0]].append(node)
    places = {node: at for at, node in enumerate(graph.find_nodes(op="placeholder"))}
    wholes: list[_Whole] = []
    for source, found in by_input.items():
        products = sorted(found, key=lambda node: _value(node.args[1]).storage_offset())
        if len(products) > 1 and _together(products):
            wholes += _join(graph, products, found[0], places)
        elif _few_rows(_value(source)):
            for node in found:
                node.target = torch.ops.kvsparse.few_rows_linear.default
    graph.lint()
    return wholes


def _linear_layers(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=torch._C._nn.linear)


def _is_understood(node: fx.Node) -> bool:
    """Whether a linear layer multiplies with an input of the graph, and both are plain tensors."""
    if len(node.args) != 3 or node.kwargs or node.args[1].op != "placeholder":
        return False
    return not any(map(is_traceable_wrapper_subclass, map(_value, node.args[:2])))


def _all_few_rows(graph: fx.Graph) -> bool:
    layers = _linear_layers(graph)
    return bool(layers) and all(_is_understood(node) and _few_rows(_value(node.args[0])) for node in layers)


def _value(node: fx.Node) -> Tensor:
    return node.meta["example_value"]


def _few_rows(x: Tensor) -> bool:
    """Whether our own kernel multiplies: on a GPU, for more rows than Inductor does as a reduction, and no more than it takes."""
    return x.is_cuda and x.element_size() == 2 and 1 < x.shape[:-1].numel() <= MOST_ROWS


def _together(products: list[fx.Node]) -> bool:
    weights, biases = ([node.args[at] for node in products] for at in (1, 2))
    if not side_by_side([_value(weight) for weight in weights]):
        return False
    if all(bias is None for bias in biases):
        return True
    given = all(isinstance(bias, fx.Node) and bias.op == "placeholder" for bias in biases)
    return given and side_by_side([_value(bias) for bias in biases])


def _join(graph: fx.Graph, products: list[fx.Node], before: fx.Node, places: dict[fx.Node, int]) -> list[_Whole]:
    source = products[0].args[0]
    widths = [len(_value(node.args[1])) for node in products]
    firsts = [node for node in products[0].args[1:] if node is not None]
    wholes = [_Whole(places[node], (sum(widths), *_value(node).shape[1:])) for node in firsts]
    linear = torch.ops.kvsparse.few_rows_linear.default if _few_rows(_value(source)) else torch._C._nn.linear
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        # inserted behind the same node, the last comes first
        joined = [graph.placeholder(f"joined_{node.name}") for node in reversed(firsts)][::-1]
    with graph.inserting_before(before):
        product = graph.call_function(linear, (source, *joined, *[None] * (2 - len(joined))))
        parts = graph.call_function(torch.split, (product, widths, -1))
        for at, node in enumerate(products):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (parts, at)))
    for node in products:
        graph.erase_node(node)
    return wholes
