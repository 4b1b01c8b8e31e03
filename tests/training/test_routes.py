"""Routing replay: what is refused, what a pass takes, and which check sees which fault."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from fsm_trainer.data.routing import Routing, routers
from fsm_trainer.data.tiny import TinyModelConfig, make_tiny_model
from fsm_trainer.data.trajectory import Sample, Status, Trajectory
from fsm_trainer.machine.errors import CapabilityMissing, DataError, SelfCheckFailed
from fsm_trainer.machine.version import Version
from fsm_trainer.training.batch import Batch, collate
from fsm_trainer.training.models import traits
from fsm_trainer.training.packing import Layout
from fsm_trainer.training.routes import Replay
from tests.training import routed
from tests.training.ranks import run_ranks

LAYERS, EXPERTS, TOP_K = 3, 8, 2
ROUTING = Routing(LAYERS, EXPERTS, TOP_K)
SHAPE = TinyModelConfig(
    hidden=32, intermediate=24, layers=LAYERS, heads=2, kv_heads=1, experts=EXPERTS
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "moe", SHAPE, seed=0)


@pytest.fixture
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def some_routes(tokens: int, seed: int = 0) -> npt.NDArray[np.int32]:
    """For each token and layer two experts, unlike each other."""
    order = np.random.default_rng(seed).random((tokens, LAYERS, EXPERTS)).argsort(axis=-1)
    return order[..., :TOP_K].astype(np.int32)


def trajectory(routes: Any = "some", tokens: int = 6, seed: int = 0) -> Trajectory:
    mask = np.ones(tokens, dtype=np.uint8)
    mask[0] = 0
    return Trajectory(
        sample=Sample(f"sum/{seed}", "p", None, "g"),
        tokens=np.random.default_rng(seed).integers(2, 258, tokens).astype(np.int32),
        loss_mask=mask,
        logprobs=-mask.astype(np.float32),
        version=Version(0, 1),
        status=Status.FINISHED,
        text="",
        reward=1.0,
        routes=some_routes(tokens - 1, seed) if isinstance(routes, str) else routes,
    )


def batch(*lengths: int) -> Batch:
    made = [trajectory(tokens=n, seed=seed) for seed, n in enumerate(lengths)]
    return collate(made, 0, ROUTING)


# -- which models have routes ----------------------------------------------------------------------


def test_a_models_routing_is_read_from_its_folder(folder: Path, model: Any) -> None:
    assert Routing.of(folder) == ROUTING
    assert len(routers(model)) == LAYERS


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "qwen3"}, "is a qwen3 model: routes are replayed for qwen3_moe"),
        ({"mlp_only_layers": [1]}, "has dense layers between its mixtures"),
        ({"decoder_sparse_step": 2}, "has dense layers between its mixtures"),
    ],
)
def test_a_model_whose_routes_cannot_be_replayed_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    config = json.loads((folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CapabilityMissing, match=says):
        Routing.of(tmp_path)


# -- what is refused, with the sample's id, before anything is computed ----------------------------


def changed(at: tuple[int, ...], value: int) -> npt.NDArray[np.int32]:
    routes = some_routes(5)
    routes[at] = value
    return routes


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        (None, "its routes are missing"),
        (some_routes(5)[:, :2], r"are \(5, 2, 2\), the model's are \(5, 3, 2\)"),
        (some_routes(5)[..., :1], r"are \(5, 3, 1\), the model's are \(5, 3, 2\)"),
        (changed((4, 2, 1), 8), r"outside of \[0, 8\)"),
        (changed((0, 0, 0), -1), r"outside of \[0, 8\)"),
        (np.zeros((5, 3, 2), np.int32), "all 0, of all tokens or of all generated"),
        (changed((3,), 0), "send token 3 to one expert twice"),
    ],
)
def test_routes_that_cannot_be_are_refused_with_the_samples_id(routes: Any, says: str) -> None:
    with pytest.raises(DataError, match=f"sample 'sum/7': .*{says}"):
        collate([trajectory(seed=1), trajectory(routes, seed=7)], 0, ROUTING)


def test_one_expert_a_token_may_be_0_but_not_throughout_what_was_generated() -> None:
    one = ROUTING._replace(top_k=1)
    recorded = some_routes(5)[..., :1]
    recorded[0], recorded[2] = 7, 0
    collate([trajectory(recorded)], 0, one)
    recorded[1:] = 0  # only the prompt's token was recorded
    with pytest.raises(DataError, match="or of all generated"):
        collate([trajectory(recorded)], 0, one)


def test_a_mixtures_traits_say_that_it_has_experts(model: Any) -> None:
    assert traits(model).experts


def test_without_replay_routes_are_left_out() -> None:
    assert collate([trajectory()], 0).routes is None


# -- where they stand in a batch -------------------------------------------------------------------


def test_a_batch_has_each_tokens_routes_at_its_place_and_none_where_it_ends() -> None:
    made = batch(6, 4)
    assert made.routes is not None and made.routes.shape == (2, 6, LAYERS, TOP_K)
    assert made.routes[0, :5].tolist() == some_routes(5, 0).tolist()
    assert made.routes[1, :3].tolist() == some_routes(3, 1).tolist()
    assert made.routes[0, 5].eq(-1).all() and made.routes[1, 3:].eq(-1).all()
    cut = made.select([1, -1]).trim()
    assert cut.routes is not None and cut.routes.shape[:2] == (2, 6)
    assert torch.equal(cut.routes, made.routes[[1, 0]])
    alone = made.select([1]).trim().routes
    assert alone is not None and torch.equal(alone, made.routes[1:, :4])


def test_packing_arranges_routes_as_tokens() -> None:
    made = batch(9, 5, 4)
    assert made.routes is not None
    # A token that names its routes: then both must still agree wherever they come to stand.
    named = replace(made, tokens=made.routes[:, :, 0, 0].long() + 10)
    layout = Layout(named.tokens, named.lengths, packing=True)
    routes = layout.arrange(made.routes[:, :-1], fill=-1)
    assert routes.shape == (2, 8, LAYERS, TOP_K)
    read = layout.inputs >= 10
    assert int(read.sum()) == 8 + 4 + 3
    assert torch.equal(layout.inputs[read], routes[..., 0, 0][read].long() + 10)
    assert routes[~read].eq(-1).all()


# -- what a pass takes -----------------------------------------------------------------------------


def own_routes(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(tokens, output_router_logits=True).router_logits
    chosen = [layer.topk(TOP_K).indices.view(*tokens.shape, TOP_K) for layer in logits]
    return torch.stack(chosen, dim=2)


def forward(model: Any, replay: Replay, tokens: torch.Tensor, routes: torch.Tensor | None) -> Any:
    with replay.taking(routes) as taken:
        return model(tokens).logits, taken


def test_the_models_own_routes_replayed_change_no_bit(model: Any) -> None:
    replay, tokens = Replay(model), batch(9, 5).tokens
    free, _ = forward(model, replay, tokens, None)
    again, taken = forward(model, replay, tokens, own_routes(model, tokens))
    assert torch.equal(free, again)
    assert taken.rerouted.eq(0).all()


def test_replayed_experts_are_weighted_as_the_equation_says(model: Any) -> None:
    """Softmax over all experts, those recorded, divided by their sum: written out with loops."""
    replay, [router, *_] = Replay(model), routers(model)
    routes = torch.tensor(some_routes(5))[None].long()
    hidden = torch.randn(5, SHAPE.hidden)
    one_alone = pytest.raises(SelfCheckFailed, match=r"took them \[1, 0, 0\] times")
    with one_alone, replay.taking(routes):
        _, weights, experts = router(hidden)
    assert torch.equal(experts, routes[0, :, 0])
    for place, chosen in enumerate(experts.tolist()):
        all_of_them = (hidden[place] @ router.weight.T).double().exp().tolist()
        picked = [all_of_them[expert] / sum(all_of_them) for expert in chosen]
        for given, mine in zip(weights[place].tolist(), picked, strict=True):
            assert given == pytest.approx(mine / sum(picked), rel=1e-5)


def test_routers_choose_where_nothing_was_recorded(model: Any) -> None:
    replay, tokens = Replay(model), batch(9, 5).tokens
    free, _ = forward(model, replay, tokens, None)
    nothing = torch.full((*tokens.shape, LAYERS, TOP_K), -1)
    assert torch.equal(forward(model, replay, tokens, nothing)[0], free)


def test_other_experts_are_taken_and_told(model: Any) -> None:
    replay, tokens = Replay(model), batch(9, 5).tokens
    own = own_routes(model, tokens)
    swapped, other = own.flip(-1), own.clone()
    other[0, 2, 1] = torch.tensor([e for e in range(EXPERTS) if e not in own[0, 2, 1]])[:TOP_K]
    free, _ = forward(model, replay, tokens, None)
    for routes, share in ((swapped, 0.0), (other, 1 / LAYERS)):
        logits, taken = forward(model, replay, tokens, routes)
        assert float(taken.rerouted[0, 2]) == pytest.approx(share)
        assert float(taken.rerouted.sum()) == pytest.approx(share)
    assert torch.equal(logits[0, :2], free[0, :2]) and torch.equal(logits[1], free[1])
    assert not torch.equal(logits[0, 2:], free[0, 2:])


def gradients(model: Any, replay: Replay, routes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tokens = batch(9, 9).tokens
    model.zero_grad()
    logits, _ = forward(model, replay, tokens, routes)
    # Other passes come between: what recomputes must not take theirs.
    forward(model, replay, tokens, None)
    with torch.no_grad():
        forward(model, replay, tokens, torch.tensor(np.stack([some_routes(9, 8)] * 2)))
    logits.log_softmax(-1)[..., 7].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_recomputation_takes_the_same_routes_and_gives_the_same_gradient(folder: Path) -> None:
    plain, again = (AutoModelForCausalLM.from_pretrained(folder).train() for _ in range(2))
    replay, recomputing = Replay(plain), Replay(again)
    again.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": recomputing.contexts}
    )
    routes = torch.tensor(np.stack([some_routes(9, 0), some_routes(9, 1)]))
    expected, found = gradients(plain, replay, routes), gradients(again, recomputing, routes)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    free = gradients(plain, replay, None)
    gates = [name for name in expected if name.endswith("mlp.gate.weight")]
    assert len(gates) == LAYERS
    for name in gates:  # routers learn, through the weights of the recorded experts
        assert expected[name].abs().max() > 0 and not torch.equal(expected[name], free[name])


# -- each layer takes its routes once --------------------------------------------------------------


def test_a_layer_that_takes_nothing_or_twice_fails_the_pass(model: Any) -> None:
    replay, tokens = Replay(model), batch(9, 5).tokens
    routes = own_routes(model, tokens)
    nothing = pytest.raises(SelfCheckFailed, match=r"took them \[0, 0, 0\] times")
    with nothing, replay.taking(routes):
        pass
    twice = pytest.raises(SelfCheckFailed, match=r"took them \[2, 2, 2\] times")
    with twice, replay.taking(routes):
        model(tokens)
        model(tokens)


def test_a_backward_pass_that_recomputes_without_routes_fails(model: Any) -> None:
    replay, tokens = Replay(model), batch(9, 5).tokens
    forward(model, replay, tokens, own_routes(model, tokens))
    with pytest.raises(
        SelfCheckFailed, match=r"backward pass .* 1 times and took them \[0, 0, 0\]"
    ):
        replay.check_recomputed(1)
    # Of passes without routes, or checked before, there is nothing to say.
    replay.check_recomputed(1)
    with torch.no_grad():
        forward(model, replay, tokens, own_routes(model, tokens))
    replay.check_recomputed(1)


def test_a_dense_model_takes_no_routes() -> None:
    refused = pytest.raises(CapabilityMissing, match="routes of 3 layers, and the model 0 routers")
    with refused, Replay(torch.nn.Linear(2, 2)).taking(torch.zeros(1, 5, LAYERS, TOP_K)):
        pass


# -- whole updates, on 1 and 2 ranks ---------------------------------------------------------------


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Any]:
    """Metrics and weights after two updates, by ranks and case."""
    found: dict[tuple[int, str], Any] = {}
    for world in (1, 2):
        folder = tmp_path_factory.mktemp(f"{world}-ranks")
        told, *_ = run_ranks(world, folder, "tests.training.routed")
        found |= {(world, name): torch.load(folder / f"{name}.pt") for name in routed.CASES}
        found |= {(world, name): what for name, what in told.items()}
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", [name for name in routed.CASES if name != "whole"])
def test_neither_ranks_nor_recomputation_nor_packing_change_a_replayed_update(
    updates: dict[tuple[int, str], Any], world: int, case: str
) -> None:
    expected, found = updates[1, "whole"], updates[world, case]
    for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        # Three layers of about ten sums each, taken in another order.
        assert mine == pytest.approx(theirs, rel=100 * 2.0**-24, abs=100 * 2.0**-24)
    gaps = [(found["weights"][name] - there).abs() for name, there in expected["weights"].items()]
    # A hundredth of what a step of Adam moves a weight by.
    assert max(float(gap.max()) for gap in gaps) < routed.RATE / 100


@pytest.mark.parametrize("world", [1, 2])
def test_recomputing_a_replayed_update_changes_no_bit(
    updates: dict[tuple[int, str], Any], world: int
) -> None:
    kept, recomputed = updates[world, "accumulated"], updates[world, "recomputed"]
    assert kept["metrics"] == recomputed["metrics"]
    assert kept["checksum"] == recomputed["checksum"]


def test_the_updates_replay_what_the_routers_would_not_choose(
    updates: dict[tuple[int, str], Any],
) -> None:
    first, second = updates[1, "whole"]["metrics"]
    assert first["check/route_disagreement"] > 0.5
    assert first["train/kl"] == 0.0 and second["train/kl"] > 0


# -- planted faults, and the check that sees each --------------------------------------------------


@pytest.mark.parametrize("fault", ["a token", "a layer", "another sample"])
def test_routes_that_belong_elsewhere_set_trainer_and_engine_apart(
    updates: dict[tuple[int, str], Any], fault: str
) -> None:
    said = updates[1, "faults"][fault]
    assert "trainer and engine differ by" in said["mismatch"]
    # Actor and reference take the same wrong routes: between them nothing can be seen.
    assert said["zero_kl"] == said["skipped"] == ""


@pytest.mark.parametrize(
    "fault", ["a reference with one weight changed", "a reference that routes freely"]
)
def test_another_reference_is_seen_under_replayed_routes(
    updates: dict[tuple[int, str], Any], fault: str
) -> None:
    said = updates[1, "faults"][fault]
    assert "the first step's actor is not its reference" in said["zero_kl"]
    assert said["skipped"] == "", "a check that is off under replay would have let it pass"


def test_right_routes_pass_every_check(updates: dict[tuple[int, str], Any]) -> None:
    assert set(updates[1, "faults"]["none"].values()) == {""}


def test_the_kl_with_free_routing_is_that_of_the_models_alone(
    updates: dict[tuple[int, str], Any],
) -> None:
    found, expected = updates[1, "free"]
    assert found[0] == 0.0 and found[1] > 1e-6
    assert found == pytest.approx(expected, rel=1e-3)
