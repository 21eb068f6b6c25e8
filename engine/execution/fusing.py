"""Changes a recorded forward: one flat graph, with compiled operators in place of torch's calls.

The operators (`engine.operators`) compute the bits of the calls that they replace. The rest stays.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine.attention.base import AttentionOptions

# Calls of which each number has the same bits wherever it stands among others: they move numbers,
# add, multiply, divide or look them up, or they are sines or tanh, which torch computes by one
# function. Nobody drops any out while serving. A greatest position chooses between rotary tables.
_PACKED = "mkldnn::_linear_pointwise"  # of one row alone, other bits than among others
_BY_ROW_KINDS = ("prim::", "cachesvc::", _PACKED)
_CALLS = (
    "Int add cat chunk contiguous copy_ cos div dropout expand flatten floor_divide full_like gt "
    "index index_select max mul neg permute repeat_interleave reshape select sin size slice split "
    "stack sub tanh to transpose type_as unsqueeze view where"
)
_BY_ROW = frozenset(f"aten::{name}" for name in _CALLS.split())
# Of these, a row of the result is one of each tensor of rows.
_ROW_WISE = {"aten::add", "aten::mul", "cachesvc::linear", "cachesvc::norm"}
_ROW_WISE |= {"cachesvc::silu_mul", "cachesvc::gelu_mul"}
_FIXED = ("prim::GetAttr", "prim::Constant")
NUM_RECORDED = 5  # tokens with which a forward is recorded
_VECTORS = 32  # numbers that torch computes at once, at most
_ACTIVATIONS = {"silu_mul": "aten::silu", "gelu_mul": "aten::gelu"}
_PRODUCT, _TURNED = "aten::mul(%activated, %up)", "aten::mul(%up, %activated)"


def _gated(name: str, more: str = "") -> tuple[str, str]:
    """What multiplies by an activation, and its operator. `more`: what else activating is given."""
    return (
        f"""graph(%gate, %up{more}):
  %activated = aten::{name}(%gate{more})
  %product = {_PRODUCT}
  return (%product)""",
        f"""graph(%gate, %up{more}):
  %product = cachesvc::{name}_mul(%gate, %up)
  return (%product)""",
    )


# What is replaced, and by what. Norms are without their weight, which models apply differently.
# Constants are inputs of a pattern, because torch compares none that have other uses. If one were
# not as usual, the logits of the check would be others (`engine.execution.traced`).
_PATTERNS = {
    "norm": (
        """graph(%x, %eps, %two, %dims, %keep, %none, %one):
  %squares = aten::pow(%x, %two)
  %mean = aten::mean(%squares, %dims, %keep, %none)
  %sum = aten::add(%mean, %eps, %one)
  %scale = aten::rsqrt(%sum)
  %normed = aten::mul(%x, %scale)
  return (%normed)""",
        """graph(%x, %eps, %two, %dims, %keep, %none, %one):
  %normed = cachesvc::norm(%x, %eps)
  return (%normed)""",
    ),
    "silu_mul": _gated("silu"),
    "gelu_mul": _gated("gelu", ", %kind"),
    "rotate": (
        """graph(%x, %cos, %sin, %half, %zero, %dim, %all, %one, %last):
  %straight = aten::mul(%x, %cos)
  %head = aten::slice(%x, %dim, %zero, %half, %one)
  %tail = aten::slice(%x, %dim, %half, %all, %one)
  %negative = aten::neg(%tail)
  %both : Tensor[] = prim::ListConstruct(%negative, %head)
  %turned = aten::cat(%both, %last)
  %across = aten::mul(%turned, %sin)
  %rotated = aten::add(%straight, %across, %one)
  return (%rotated)""",
        """graph(%x, %cos, %sin, %half, %zero, %dim, %all, %one, %last):
  %rotated = cachesvc::rotate(%x, %cos, %sin)
  return (%rotated)""",
    ),
}


def flatten(graph: Any, inside: Any, options: Mapping[int, AttentionOptions]) -> None:
    """Put the graphs of a model's modules into one, and let each layer call `inside`, the
    attribute of the forward that attends, with its `options`."""
    torch._C._jit_pass_inline(graph)
    forward = next(iter(graph.inputs()))
    for node in graph.findAllNodes("cachesvc::attend", recurse=True):
        scaling, window, softcap, sinks = options[node.inputsAt(0).toIValue()]
        graph.setInsertPoint(node)
        attribute = _insert(graph, "prim::GetAttr", [forward], "inside", inside._c._type())
        given = [graph.insertConstant(each) for each in (float(scaling), window, softcap, sinks)]
        attended = _insert(
            graph,
            "prim::CallMethod",
            [attribute, *node.inputs(), *given],
            "forward",
            torch._C.TensorType.get(),
        )
        node.output().replaceAllUsesWith(attended)
        node.destroy()
    graph.setInsertPoint(graph.return_node())  # a node that no pass takes out
    torch._C._jit_pass_cse(graph)
    torch._C._jit_pass_dce(graph)


def _insert(graph: Any, kind: str, inputs: list[Any], name: str, output: Any) -> Any:
    """The value of a new node at the point where nodes are inserted."""
    node = graph.create(kind, inputs, 1)
    node.s_("name", name)
    node.output().setType(output)
    graph.insertNode(node)
    return node.output()


def fuse(graph: Any) -> None:
    """Replace calls of a flat graph by compiled operators."""
    for node in graph.findAllNodes("aten::to"):
        if _is_float(node.inputsAt(0)) and _is_float(node.output()):
            node.output().replaceAllUsesWith(node.inputsAt(0))
    torch._C._jit_pass_dce(graph)
    rewrite: Callable[[str, str, Any], None]
    rewrite = torch._C._jit_pass_custom_pattern_based_rewrite_graph
    for name, (pattern, replacement) in _PATTERNS.items():
        activations = graph.findAllNodes(_ACTIVATIONS[name]) if name in _ACTIVATIONS else ()
        if all(map(_is_activated, activations)):
            rewrite(pattern, replacement, graph)
            rewrite(pattern.replace(_PRODUCT, _TURNED), replacement, graph)
    torch._C._jit_pass_dce(graph)


def leave_rows(graph: Any) -> bool:
    """Compute only those rows of the layers' output that the graph's last input names, as far back
    as nothing else needs others: in the last layer, after attention. Returns whether that is so."""
    kept, (_, states) = [*graph.inputs()][-1], graph.return_node().inputsAt(0).node().inputs()
    nodes = [each for each in graph.nodes() if each.kind() in _ROW_WISE and _is_by_row(each)]
    few = {states.debugName()} & {each.output().debugName() for each in nodes}
    for node in reversed(nodes):
        users = [use.user for use in node.output().uses()]
        if all(each.kind() in _ROW_WISE and each.output().debugName() in few for each in users):
            few.add(node.output().debugName())
    for node in (each for each in nodes if each.output().debugName() in few):
        for place, value in enumerate(node.inputs()):
            if value.node().kind() not in _FIXED and value.debugName() not in few:
                graph.setInsertPoint(node)
                given = [value, graph.insertConstant(1), kept]
                picked = graph.insertNode(graph.create("aten::index_select", given, 1))
                node.replaceInput(place, picked.output())
    return states.debugName() in few


def _is_by_row(node: Any) -> bool:
    """Whether what a node puts out, and is given but for weights, has a row for each token."""
    given = [value for value in node.inputs() if value.node().kind() not in _FIXED]
    types = [value.type() for value in (*given, node.output())]
    sizes = [each.sizes() if isinstance(each, torch._C.TensorType) else None for each in types]
    return all(each and each[:2] == [1, NUM_RECORDED] and len(each) == 3 for each in sizes)


def activates_by_row(graph: Any) -> bool:
    """Whether no call computes numbers by other functions where torch's threads divide them. Such
    are its activations. A call that is not known counts as one."""
    return all(
        node.kind().startswith(_BY_ROW_KINDS) or node.kind() in _BY_ROW for node in graph.nodes()
    )


def computes_one_row(graph: Any) -> bool:
    """Whether a row has the same bits alone as among others. Without, a step has two rows."""
    return activates_by_row(graph) and not graph.findAllNodes(_PACKED)


def _is_activated(node: Any) -> bool:
    """Whether an operator computes this activation: of GELU's the approximation, and rows that end
    where torch's vectors do. It computes the last numbers of others by another function,
    which no check of a few rows would show."""
    if node.kind() == "aten::gelu" and node.inputsAt(1).toIValue() != "tanh":
        return False
    sizes = node.output().type().sizes()
    return sizes is not None and sizes[-1] % _VECTORS == 0


def _is_float(value: Any) -> bool:
    """Whether the recorded tensor was float32."""
    kind = value.type()
    return isinstance(kind, torch._C.TensorType) and kind.scalarType() == "Float"
