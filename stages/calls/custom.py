"""Losses that clients write: graphs of torch's functions, as torch.fx traces them.

    graph ─▶ check_graph: names and forms, without torch ─▶ kept by the service ─▶ option "graph" of a pass
          ─▶ CustomLoss.check: run on tensors without memory ─▶ refused by node, or:
          ─▶ per_token: run for each datum, the losses added up

What a node may call is listed here: arithmetic, reductions and forms of tensors. None reads a place
that a value names: one out of range would end the process of a GPU. None is random, so that calls
can be made again to the same bits.

Importing this needs no torch.
"""

from __future__ import annotations

import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.calls.interface import CallRefused, LossOptions
from stages.calls.losses import DatumColumns, Loss, LossTokens

if TYPE_CHECKING:
    import torch

GRAPH = "graph"  # the option that has inputs and nodes, as JSON
LOGPROBS = "logprobs"
MOST_INPUTS = 16
MOST_NODES = 500
MOST_VALUES = 1 << 28  # of all nodes' tensors, in one pass
METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTIONS = _names(
    "abs add all amax amin any arange broadcast_to cat ceil clamp clamp_max clamp_min clip concat "
    "cos cosh cummax cummin cumprod cumsum diff div divide dot eq erf erfc exp expm1 flatten flip "
    "float_power floor floor_divide fmod full full_like ge gt isfinite isinf isnan le lerp log "
    "log10 log1p log2 log_softmax logaddexp logcumsumexp logical_and logical_not logical_or "
    "logical_xor logit logsumexp lt masked_fill max maximum mean median min minimum movedim mul "
    "multiply nan_to_num nanmean nansum narrow ne neg negative norm numel ones ones_like permute "
    "positive pow prod reciprocal relu remainder reshape roll round rsqrt sigmoid sign sin sinh "
    "softmax sort sqrt square squeeze stack std sub subtract sum t tan tanh topk transpose tril "
    "triu true_divide trunc unsqueeze var where xlogy zeros zeros_like"
)
METHODS = FUNCTIONS | _names(
    "bfloat16 bool clone contiguous detach dim double expand expand_as float half int long "
    "new_full new_ones new_zeros size to type_as view view_as"
)
FUNCTIONAL = _names(
    "elu gelu hardtanh huber_loss l1_loss leaky_relu log_softmax logsigmoid mse_loss relu sigmoid "
    "silu smooth_l1_loss softmax softplus softsign tanh threshold"
)
OPERATORS = _names(
    "abs add and_ eq floordiv ge getitem gt inv invert le lt mod mul ne neg or_ pos pow sub "
    "truediv xor"
)
ALLOWED = {
    "torch": FUNCTIONS,
    "torch.nn.functional": FUNCTIONAL,
    "torch._C._nn": FUNCTIONAL | {"log_sigmoid"},  # where torch.fx says some of them are
    "operator": OPERATORS,
    "": frozenset(["getattr"]),
}
REFUSED_OPTIONS = {"generator", "inplace", "names", "out", "pin_memory", "requires_grad"}
ATTRIBUTES = ("T", "device", "dtype", "indices", "mT", "ndim", "shape", "values")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "bool")


def check_graph(graph: Mapping[str, Any]) -> None:
    """Raise CallRefused where ``graph`` with its ``inputs`` is no loss that could run here."""
    inputs, nodes = graph["inputs"], graph["nodes"]
    names = [each["name"] for each in inputs]
    is_named = all(map(INPUT.fullmatch, names)) and len({*names}) == len(names)
    if not is_named or names[:1] != [LOGPROBS] or len(names) > MOST_INPUTS:
        fix = f"give {LOGPROBS}, and at most {MOST_INPUTS - 1} other names of lowercase letters"
        raise CallRefused.of("inputs", names[:20], "are no inputs of a loss", fix)
    if any(not (each["name"] == LOGPROBS) <= each["rank"] <= 2 for each in inputs):
        raise CallRefused.of("inputs", None, "have a rank out of range", "give 1 or 2; 0: a number")
    if not 0 < len(nodes) <= MOST_NODES:
        raise CallRefused.of("graph.nodes", len(nodes), "nodes", f"give 1 to {MOST_NODES}")
    counts = Counter(node["op"] for node in nodes)
    if counts["output"] != 1 or nodes[-1]["op"] != "output":
        raise CallRefused.of("graph.nodes", None, "have not one output, at their end", "trace it")
    for number, node in enumerate(nodes):
        target = node["target"]
        module, _, name = target.rpartition(".")
        is_known = {
            "placeholder": target in names,
            "call_function": name in ALLOWED.get(module, ()),
            "call_method": target in METHODS,
            "output": True,
        }.get(node["op"], False)
        if not is_known:
            wrong = f"is no {node['op']} that a loss may use here"
            fix = "compute it with others, or give forward_backward_custom a function"
            raise CallRefused.of(f"graph.nodes.{number}.target", target[:200], wrong, fix)


class CustomLoss(Loss):
    """The loss of a client, which has it uploaded. Each datum has one, and they are added up."""

    name = "custom"
    inputs: tuple[str, ...] = ()

    def __init__(self, graph: Mapping[str, Any] | None = None) -> None:
        if graph is not None:
            self._nodes: Sequence[Mapping[str, Any]] = graph["nodes"]
            self.ranks = {each["name"]: each["rank"] for each in graph["inputs"]}
            self._rank = self.ranks.pop(LOGPROBS)
            self.inputs = tuple(self.ranks)
            self.several_targets = self._rank == 2
        self._sums: dict[str, Any] = {}

    def configured(self, options: LossOptions) -> tuple[Loss, dict[str, float]]:
        """Return the loss in ``options``. Raises CallRefused."""
        field = "loss_fn_config.loss_id"
        if GRAPH not in options:
            fix = "give forward_backward_custom the handle of create_custom_loss"
            raise CallRefused.of(field, None, "names no loss", fix)
        try:
            graph = json.loads(str(options[GRAPH]))
            check_graph(graph)
            return CustomLoss(graph), {}
        except CallRefused:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise CallRefused.of(field, None, f"is no loss ({error!r})", "upload it") from None

    def check(self, data: Sequence[DatumColumns]) -> None:
        """Run it on tensors without memory, once for each shape in ``data``. Raises CallRefused."""
        import torch

        examples: dict[tuple[tuple[int, ...], ...], DatumColumns] = {}
        counts: Counter[tuple[tuple[int, ...], ...]] = Counter()
        for datum in data:
            shapes = datum.targets.shape, *(values.shape for values in datum.inputs.values())
            examples.setdefault(shapes, datum)
            counts[shapes] += 1
        room = MOST_VALUES
        for shapes, datum in examples.items():
            if len(shapes[0]) != self._rank:
                wrong = f"have the shape {[*shapes[0]]}, and the loss reads rank {self._rank}"
                raise CallRefused.of(
                    "target_tokens", None, wrong, "declare the rank that they have"
                )
            run = _Run(self._nodes, torch.device("meta"), room // counts[shapes])
            logprobs = torch.empty(shapes[0], device="meta", requires_grad=True)
            run.check(logprobs, datum)
            room -= counts[shapes] * run.values

    def per_token(self, tokens: LossTokens) -> torch.Tensor:
        """Return the loss [T] with gradient: a datum's is at its first target.

        Raises CallRefused for what tensors without memory do not show, such as a difference of
        truth values.
        """
        import torch

        run = _Run(self._nodes, tokens.logprobs.device)
        self._sums = {"tokens:sum": tokens.logprobs.numel()}
        losses = []
        firsts = []
        at = 0
        for datum in tokens.data:
            size = datum.targets.size
            logprobs = tokens.logprobs[at : at + size].view(datum.targets.shape)
            try:
                loss, metrics = run.outputs(logprobs, datum)
            except (torch.AcceleratorError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever torch says of a client's graph
                raise run.refusal(error) from None
            for name, value in metrics.items():
                self._sums[name] = self._sums.get(name, 0.0) + value.detach()
            losses.append(loss.to(logprobs.dtype))
            firsts.append(at)
            at += size
        places = torch.tensor(firsts, device=tokens.logprobs.device)
        return tokens.logprobs.new_zeros(at).index_add(0, places, torch.stack(losses))

    def metrics(self, tokens: LossTokens) -> dict[str, torch.Tensor]:
        """Return those of the data that :meth:`per_token` had last."""
        return self._sums


class _Run:
    """Runs ``nodes`` on ``device``. ``most``: values of their tensors in one run; None: any."""

    def __init__(
        self, nodes: Sequence[Mapping[str, Any]], device: torch.device, most: int | None = None
    ) -> None:
        self.values = 0
        """Of the tensors so far."""
        self._nodes = nodes
        self._device = device
        self._most = most
        self._results: dict[str, Any] = {}

    def check(self, logprobs: torch.Tensor, datum: DatumColumns) -> None:
        """Raise CallRefused where there is no loss of a datum like this one."""
        try:
            loss, metrics = self.outputs(logprobs, datum)
            if loss.shape or not (loss.requires_grad and loss.is_floating_point()):
                raise TypeError(f"gives a {loss.dtype} {[*loss.shape]}, no number with a gradient")
            loss.backward()  # torch has no derivative of some functions, and says so here alone
            for name, value in metrics.items():
                if not METRIC.fullmatch(name) or value.shape:
                    raise TypeError(f"has {name!r}, which is no number custom/NAME:sum or :mean")
        except Exception as error:  # whatever torch says of a client's graph
            raise self.refusal(error) from None

    def refusal(self, error: Exception) -> CallRefused:
        """Return what to say of ``error``, which the node raised that was run last."""
        node = self._nodes[min(len(self._results), len(self._nodes) - 1)]["name"]
        reason = str(error).encode("ascii", "backslashreplace").decode()
        wrong = f"cannot be computed: {reason[:300]}"
        fix = "try it with data of these shapes, on tensors of device meta and of device cpu"
        return CallRefused.of(f"custom loss, node {node}", None, wrong, fix)

    def outputs(self, logprobs: torch.Tensor, datum: DatumColumns) -> Any:
        """Return the loss, and the metrics by name, of ``datum``."""
        import torch

        placeholders = {LOGPROBS: logprobs}
        for name, values in datum.inputs.items():
            placeholders[name] = torch.tensor(values, device=self._device)
        self._results = {}
        with torch.device(self._device):
            for node in self._nodes[:-1]:
                target = node["target"]
                if node["op"] == "placeholder":
                    result = placeholders[target]
                else:
                    result = self._called(node["op"], target, node["args"], node["kwargs"])
                if self._most is not None:
                    self._count(result)
                self._results[node["name"]] = result
        return self._decoded(self._nodes[-1]["args"][0])

    def _called(
        self, op: str, target: str, encoded: Sequence[Any], named: Mapping[str, Any]
    ) -> Any:
        import torch

        if REFUSED_OPTIONS & named.keys():
            raise TypeError(f"{target} has no option {[*REFUSED_OPTIONS & named.keys()]} here")
        args = [self._decoded(each) for each in encoded]
        options = {name: self._decoded(each) for name, each in named.items()}
        if "device" in options:
            options["device"] = self._device
        if op == "call_method":
            return getattr(torch.Tensor, target)(*args, **options)
        module, _, name = target.rpartition(".")
        match module:
            case "torch":
                return getattr(torch, name)(*args, **options)
            case "torch.nn.functional" | "torch._C._nn":
                public = {"log_sigmoid": "logsigmoid"}.get(name, name)
                return getattr(torch.nn.functional, public)(*args, **options)
            case "operator":
                return _operated(name, *args)
        return _attribute(*args)

    def _decoded(self, value: Any) -> Any:
        """Return an argument of a node, as types.CustomLossNode of the SDK describes it."""
        import torch

        if isinstance(value, list):
            return [self._decoded(each) for each in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        match kind:
            case "ref":
                return self._results[content]
            case "tuple":
                return tuple(self._decoded(content))
            case "dict":
                return {name: self._decoded(each) for name, each in content.items()}
            case "slice":
                return slice(*self._decoded(content))
            case "ellipsis":
                return ...
            case "float":
                return float(content)
            case "dtype" if content in DTYPES:
                return getattr(torch, content)
            case "device":
                return self._device
        raise TypeError(f"the argument {kind} {content!r} is not taken here")

    def _count(self, result: Any) -> None:
        """Raise ValueError for more values than there may be."""
        import torch

        if isinstance(result, torch.Tensor):
            self.values += result.numel()
            if self._most is not None and self.values > self._most:
                raise ValueError(f"all tensors of a pass may have {MOST_VALUES} values together")
        elif isinstance(result, tuple | list):
            for each in result:
                self._count(each)
        elif isinstance(result, int) and abs(result) >= 1 << 63:
            raise ValueError(f"{result:.3e} is out of range")


def _operated(name: str, *args: Any) -> Any:
    """Return what an operator gives. Raises TypeError for values whose results could be any size."""
    import torch

    if name == "getitem":
        place = args[1] if isinstance(args[1], tuple) else args[1:]
        if any(not isinstance(each, int | slice | type(None) | type(...)) for each in place):
            raise TypeError("a place is given by numbers and slices; use torch.where for masks")
    elif not all(isinstance(each, torch.Tensor | int | float) for each in args):
        raise TypeError(f"operator.{name} is of tensors and numbers")
    elif name == "pow" and not any(isinstance(each, torch.Tensor) for each in args):
        raise TypeError("operator.pow is of tensors")
    function: Callable[..., Any] = getattr(operator, name)
    return function(*args)


def _attribute(value: Any, name: str) -> Any:
    """Raises TypeError."""
    if name not in ATTRIBUTES:
        raise TypeError(f"the attribute {name!r} is not read here")
    return getattr(value, name)
