"""The sample flow's benchmark notices wrong rows, judges as it says, and still runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.flow.samples import (
    CASES,
    Case,
    Round,
    Turn,
    against,
    fingerprint,
    main,
    stamp,
    unordered,
)

RAGGED = Case("ragged", 6, 2, 9)
DENSE = Case("dense", 6, 5, 5)


@pytest.mark.parametrize("case", [RAGGED, DENSE], ids=["ragged", "dense"])
def test_rows_in_another_order_or_of_another_turn_are_distinguished_from_the_right_ones(
    case: Case,
) -> None:
    rows = case.make()
    again = case.make()
    assert fingerprint(rows) == fingerprint(again)
    order = list(reversed(range(case.rows)))
    turned = {
        name: torch.nested.as_nested_tensor(
            [column.unbind()[i] for i in order], layout=torch.jagged
        )
        for name, column in rows.items()
    }
    assert all(fingerprint(turned)[name] != found for name, found in fingerprint(rows).items())
    assert unordered(turned) == unordered(rows), "the same rows, whatever their order"
    stamp(again, turn=1)
    assert all(fingerprint(again)[name] != found for name, found in fingerprint(rows).items())
    assert unordered(again) != unordered(rows)


def test_a_cast_of_a_column_is_noticed() -> None:
    rows = DENSE.make()
    cast = {**rows, "logprobs": rows["logprobs"].double()}
    assert fingerprint(cast)["logprobs"] != fingerprint(rows)["logprobs"]


def test_a_peer_is_reported_at_its_better_mode_against_ours_of_the_same_round() -> None:
    def rounds(seconds: dict[int, tuple[str, float]]) -> list[Round]:
        return [
            Round(number, mode, {}, (turn := Turn(taken, 9.0, 9.0, 9.0, True)), (turn, turn))
            for number, (mode, taken) in seconds.items()
        ]

    # the machine is slow every other round
    ours = rounds({0: ("", 1.0), 1: ("", 10.0), 2: ("", 1.0), 3: ("", 10.0)})
    theirs = rounds(
        {0: ("polling", 4.0), 1: ("default", 20.0), 2: ("polling", 6.0), 3: ("default", 30.0)}
    )
    assert against(theirs, ours, "put") == {"mode": "default", "seconds": 25.0, "ratio": 2.5}
    assert against(theirs, [], "put")["mode"] == "polling", "without ours, the fewer seconds"


def test_a_quick_run_of_ours_alone_reports_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--quick", "--peers", "ours", "--repeats", "1", "--json", str(tmp_path / "flow.json")])
    result = json.loads((tmp_path / "flow.json").read_text())
    assert [case["case"] for case in result["cases"]] == [case.name for case in CASES]
    for case in result["cases"]:
        ours = case["arms"]["ours"]
        assert ours["turns_out_of_order"] == 0
        assert all(
            ours[what]["us"] > 0 and ours[what]["times_ours"] == 1.0
            for what in ("put", "get", "read")
        )
        assert set(case["memcpy_mb_per_s"]) == {"warm", "fresh", "shared"}
    names = [row["name"] for row in result["rows"]]
    assert names == [
        "put, a",
        "get, a",
        "put, a2",
        "get, a2",
        "get, same rows, other bytes, caches emptied before",
        "get, a and a2",
        "put, b",
        "get, b",
        "put, c2",
        "get, c2",
        "one sample of 8192 tokens",
        "single puts from one client",
        "index alone, three stages, 1 client",
        "index alone, three stages, 2 clients",
        "index with 5,000 rows",
        "memory after 20 turns",
    ]
    without_peer = {row["name"] for row in result["rows"] if row["met"] is None}
    assert {"get, a", "get, a2"} <= without_peer, (
        "nothing is called met that was compared with nothing"
    )
    printed = capsys.readouterr().out
    assert all(row["goal"] in printed and row["measured"] in printed for row in result["rows"])


def test_an_unknown_arm_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--peers", "ours,redis"])
    assert "transferqueue" in capsys.readouterr().err
