"""Losses that clients upload, as graphs of torch.fx: what they give, and what is refused of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx
from torch.fx.node import _get_qualified_name

from stages.calls import custom
from stages.calls.checks import checked_data, checked_loss
from stages.calls.interface import AdamOptions, CallRefused, Datum, ModelOptions
from stages.calls.losses import LossTokens
from stages.calls.model import TorchCalledModel
from tests.stages.calls.data import VOCABULARY, assert_near, changed, sampled, supervised, tiny_base

LossFunction = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]


def encoded(value: Any) -> Any:
    """An argument of a node, in the form in which Tinker's SDK documents it."""
    match value:
        case torch.fx.Node():
            return {"ref": value.name}
        case list():
            return [encoded(each) for each in value]
        case tuple():
            return {"tuple": [encoded(each) for each in value]}
        case dict():
            return {"dict": {name: encoded(each) for name, each in value.items()}}
        case slice():
            return {"slice": [value.start, value.stop, value.step]}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": str(value)}
    return {"ellipsis": True} if value is ... else value


def uploaded(function: LossFunction, **ranks: int) -> dict[str, Any]:
    """The graph of ``function``, whose inputs have ``ranks``."""
    nodes = []
    for node in torch.fx.symbolic_trace(function).graph.nodes:
        target = node.target
        if callable(target):
            target = _get_qualified_name(target).replace("_operator.", "operator.")
        nodes.append(
            {
                "op": node.op,
                "name": node.name,
                "target": target,
                "args": [encoded(each) for each in node.args],
                "kwargs": {name: encoded(each) for name, each in node.kwargs.items()},
            }
        )
    return {"inputs": [{"name": n, "rank": r} for n, r in ranks.items()], "nodes": nodes}


def options(graph: Mapping[str, Any]) -> dict[str, float | str]:
    return {custom.GRAPH: json.dumps(graph)}


def of_call(node: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """A graph whose one node calls what is named, and whose loss is that."""
    op, _, target = node.partition(" ")
    nodes = [
        {"op": "placeholder", "name": "p", "target": "logprobs", "args": [], "kwargs": {}},
        {"op": op, "name": "n", "target": target, "args": [*args], "kwargs": kwargs},
        {
            "op": "output",
            "name": "output",
            "target": "output",
            "args": [{"tuple": [{"ref": "n"}, {"dict": {}}]}],
            "kwargs": {},
        },
    ]
    return {"inputs": [{"name": "logprobs", "rank": 1}], "nodes": nodes}


P: Any = {"ref": "p"}


def policy(logprobs: Any, advantages: Any, old: Any, scale: Any) -> Any:
    """Many kinds of nodes: operators, functions, methods, attributes, places, dtypes."""
    ratio = torch.exp(logprobs - old)
    clipped = torch.clamp(ratio, min=0.8, max=1.2)
    chosen = torch.minimum(ratio * advantages, clipped * advantages)
    chosen = torch.where(advantages.eq(0), torch.zeros_like(chosen), chosen)
    place = torch.arange(logprobs.shape[0], device=logprobs.device, dtype=torch.float32)
    later = (logprobs[1:] - logprobs[:-1]).square().sum()
    loss = -chosen.sum() * scale + 0.01 * later + 1e-3 * (place * logprobs).mean()
    smooth = torch.nn.functional.softplus(torch.nn.functional.logsigmoid(logprobs)).mean()
    largest = ratio.detach().max(dim=0).values
    return loss, {"custom/smooth:mean": smooth, "custom/largest:sum": largest.to(torch.float32)}


def distilled(logprobs: Any, target_distribution: Any) -> Any:
    return -(target_distribution * logprobs[..., :]).sum(), {}


def with_scale(datum: Datum, scale: float) -> Datum:
    return changed(
        datum, scale=np.array([scale], np.float32), old=datum.inputs["logprobs"], mask=None
    )


def surrogate(
    model: TorchCalledModel, data: Sequence[Datum], function: LossFunction, names: Sequence[str]
) -> tuple[float, dict[str, float]]:
    """What the SDK does without uploading: the loss here, its gradients as weights."""
    scores = model.forward(
        [changed(d, weights=np.zeros(d.inputs["target_tokens"].shape, np.float32)) for d in data],
        "cross_entropy",
        {},
    ).logprobs
    total = 0.0
    sums = dict[str, float]()
    weighted = []
    for datum, score in zip(data, scores, strict=True):
        logprobs = torch.tensor(score, dtype=torch.float64, requires_grad=True)
        inputs = [torch.tensor(datum.inputs[name]).double() for name in names]
        inputs = [each[0] if each.shape == (1,) else each for each in inputs]
        loss, metrics = function(logprobs, *inputs)
        loss.backward()
        assert logprobs.grad is not None
        weighted.append(changed(datum, weights=-logprobs.grad.float().numpy()))
        total += loss.item()
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value.item()
    model.forward_backward(weighted, "cross_entropy", {})
    means = {name: sums[name] / len(data) if name.endswith("mean") else sums[name] for name in sums}
    return total, means


@pytest.mark.parametrize("budget", [12, None])
def test_an_uploaded_loss_is_that_of_two_passes(budget: int | None) -> None:
    """Its value, metrics and gradients, however the data are packed."""
    data = [with_scale(datum, 0.5 + number) for number, datum in enumerate(sampled(group=2))]
    graph = uploaded(policy, logprobs=1, advantages=1, old=1, scale=0)
    base = tiny_base(token_budget=budget)
    one_pass, two_passes = (TorchCalledModel(base, ModelOptions(rank=4, seed=1)) for _ in range(2))
    for model in (one_pass, two_passes):  # adapters that are not zero
        model.forward_backward(supervised(seed=8), "cross_entropy", {})
        model.optimizer_step(AdamOptions(learning_rate=1e-2))
    names = ("advantages", "old", "scale")
    total, metrics = surrogate(two_passes, data, policy, names)
    seen = one_pass.forward(data, "custom", options(graph))
    output = one_pass.forward_backward(data, "custom", options(graph))
    for each in (seen, output):
        assert each.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
        for name, value in metrics.items():
            assert each.metrics[name] == pytest.approx(value, rel=1e-5)
    assert_near(
        {n: p.grad for n, p in one_pass._engine.trained.items() if p.grad is not None},
        {n: p.grad for n, p in two_passes._engine.trained.items() if p.grad is not None},
    )


def test_several_targets_are_a_matrix_for_the_loss() -> None:
    rng = np.random.default_rng(2)
    data = [
        changed(d, target_distribution=rng.random(d.inputs["target_tokens"].shape, np.float32))
        for d in supervised(k=3)
    ]
    graph = uploaded(distilled, logprobs=2, target_distribution=2)
    model = TorchCalledModel(tiny_base(), ModelOptions(rank=4))
    total, _ = surrogate(
        TorchCalledModel(tiny_base(), ModelOptions(rank=4)),
        data,
        distilled,
        ["target_distribution"],
    )
    output = model.forward_backward(data, "custom", options(graph))
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert output.logprobs[0].shape == data[0].inputs["target_tokens"].shape


def test_a_loss_that_is_not_finite_is_said_of_its_datum() -> None:
    graph = uploaded(lambda logprobs: ((logprobs * 0).log().sum(), {}), logprobs=1)
    model = TorchCalledModel(tiny_base(), ModelOptions(rank=4))
    with pytest.raises(FloatingPointError, match=r"data\.0: its custom loss is -inf"):
        model.forward_backward(supervised(), "custom", options(graph))


def test_what_only_real_tensors_show_is_refused_by_node() -> None:
    def difference(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (logprobs * (1.0 - logprobs.ge(-1.0).sub(logprobs.le(-2.0)))).sum(), {}

    model = TorchCalledModel(tiny_base(), ModelOptions(rank=4))
    with pytest.raises(CallRefused, match=r"node sub: cannot be computed: Subtraction"):
        model.forward_backward(supervised(), "custom", options(uploaded(difference, logprobs=1)))


def check(graph: Mapping[str, Any], data: Sequence[Datum] = ()) -> None:
    loss, values = checked_loss("custom", options(graph))
    data = data or [supervised()[0]]
    checked_data(data, loss, values, vocabulary=VOCABULARY, context=512)


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (of_call("call_function os.system", "true"), "graph.nodes.1.target"),
        (of_call("call_function torch.load", "/etc/passwd"), "graph.nodes.1.target"),
        (of_call("call_function torch.rand", 3), "graph.nodes.1.target"),
        (of_call("call_function builtins.getattr", P, "grad_fn"), "graph.nodes.1.target"),
        (of_call("call_method backward", P), "graph.nodes.1.target"),
        (of_call("call_method gather", P, 0, P), "graph.nodes.1.target"),
        (of_call("call_method add_", P, 1), "graph.nodes.1.target"),
        (of_call("call_module x"), "graph.nodes.1.target"),
        (of_call("get_attr x"), "graph.nodes.1.target"),
        (of_call("call_function getattr", P, "grad_fn"), "'grad_fn' is not read here"),
        (of_call("call_function operator.getitem", P, P), "use torch.where for masks"),
        (of_call("call_function operator.pow", 10, 10**9), "operator.pow is of tensors"),
        (of_call("call_function operator.mul", "x", 10**9), "is of tensors and numbers"),
        (of_call("call_function operator.mul", [0], 10**9), "is of tensors and numbers"),
        (of_call("call_function operator.mul", 2**62, 4), "is out of range"),
        (of_call("call_function torch.zeros", [10**9, 4]), "values together"),
        (of_call("call_function torch.zeros", [10**9], device="cpu"), "values together"),
        (of_call("call_method expand", P, 10**9, 9), "values together"),
        (of_call("call_function torch.add", P, 1, out=P), "has no option ['out']"),
        (of_call("call_function torch.where", P), "cannot be computed"),
        (of_call("call_function torch.exp", P), "no number with a gradient"),
        (of_call("call_function torch.zeros", []), "no number with a gradient"),
        (
            uploaded(lambda logprobs: (logprobs.floor_divide(2).sum(), {}), logprobs=1),
            "derivative for aten::floor_divide is not implemented",
        ),
        (of_call("call_function torch.sum", {"ref": "later"}), "cannot be computed: 'later'"),
        (of_call("call_function torch.sum", {"layout": "strided"}), "is not taken here"),
        (of_call("call_function torch.sum", P, dtype={"dtype": "load"}), "is not taken here"),
        ({**of_call("call_method sum", P), "inputs": [{"name": "x", "rank": 1}]}, "no inputs"),
        (
            {**of_call("call_method sum", P), "inputs": [{"name": "logprobs", "rank": 0}]},
            "a rank out of range",
        ),
        (
            {**of_call("call_method sum", P), "inputs": [{"name": "logprobs", "rank": 2}]},
            "the loss reads rank 2",
        ),
        ({"inputs": [], "nodes": []}, "inputs"),
        ({"nodes": 3}, "is no loss"),
    ],
)
def test_what_a_loss_may_not_do_is_refused_before_it_takes_memory(
    graph: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(CallRefused) as raised:
        check(graph)
    assert words in str(raised.value), raised.value


def test_metrics_have_the_names_that_clients_combine() -> None:
    for name in ("loss:sum", "custom/x", "custom/x:max", "custom/X:sum"):
        graph = of_call("call_method sum", P)
        graph["nodes"][-1]["args"] = [{"tuple": [{"ref": "n"}, {"dict": {name: {"ref": "n"}}}]}]
        with pytest.raises(CallRefused, match="is no number custom/NAME"):
            check(graph)


def test_inputs_have_the_ranks_that_the_loss_declares() -> None:
    graph = uploaded(policy, logprobs=1, advantages=1, old=1, scale=0)
    datum = with_scale(sampled()[0], 1.0)
    check(graph, [datum])
    with pytest.raises(CallRefused, match=r"data\.0\.loss_fn_inputs\.scale: has the shape \[2\]"):
        check(graph, [changed(datum, scale=np.ones(2, np.float32))])
    with pytest.raises(CallRefused, match=r"data\.0\.loss_fn_inputs\.old: is missing"):
        check(graph, [changed(datum, old=None)])


def test_room_is_that_of_all_data_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = uploaded(lambda logprobs: (logprobs.exp().sum(), {}), logprobs=1)
    datum = supervised(lengths=(10,))[0]
    monkeypatch.setattr(custom, "MOST_VALUES", 21 * 3)
    check(graph, [datum] * 3)
    with pytest.raises(CallRefused, match="values together"):
        check(graph, [datum] * 4)


def test_any_graph_is_run_or_refused_in_words() -> None:
    """Graphs with parts of others in their places, on tensors without memory and on real ones."""
    generator = random.Random(1)
    datum = with_scale(sampled()[0], 1.0)
    graph = uploaded(policy, logprobs=1, advantages=1, old=1, scale=0)
    parts: list[Any] = [None, True, -1, 2**70, 0.5, "x", [], {}, P, {"ref": "exp"}, {"tuple": [1]}]
    parts += [{"slice": [0, None, 2]}, {"dtype": "int64"}, {"ellipsis": True}, {"float": "nan"}]
    methods, functions = sorted(custom.METHODS), sorted(custom.FUNCTIONS)
    names = [*methods, *(f"torch.{name}" for name in functions), "logprobs", "scale"]
    refused = 0
    for _ in range(150):
        changed_graph = json.loads(json.dumps(graph))
        for _ in range(generator.randint(1, 3)):
            node = generator.choice(changed_graph["nodes"])
            match generator.randrange(4):
                case 0:
                    node["target"] = generator.choice(names)
                case 1 if node["args"] and isinstance(node["args"], list):
                    node["args"][generator.randrange(len(node["args"]))] = generator.choice(parts)
                case 2:
                    node["kwargs"] = {
                        generator.choice(["dim", "min", "x"]): generator.choice(parts)
                    }
                case _:
                    node[generator.choice([*node])] = generator.choice(parts)
        try:
            loss, values = checked_loss("custom", options(changed_graph))
            columns = checked_data([datum], loss, values, vocabulary=VOCABULARY, context=512)
            logprobs = torch.zeros(len(datum.tokens), requires_grad=True)
            losses = loss.per_token(LossTokens(logprobs, {}, torch.zeros(1), {}, columns))
        except CallRefused as error:
            refused += bool(str(error))
            continue
        losses.sum().backward()
    assert refused > 40
