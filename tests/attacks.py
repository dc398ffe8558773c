"""The hostile suite: which tests attack which boundary of SECURITY.md.

``pytest -m attack`` runs them, and counts what held.

A name is a file below ``tests/``, or ``FILE::test``, all parameters of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

_SANDBOX = ("orchestration/sandbox/test_sandbox.py", "orchestration/rewards/test_sandboxed.py")
_FOLDERS = "api/cli/test_foreign_folders.py"
_STORE = "orchestration/run/test_checkpoint_store.py"
_TENANTS = "api/test_tenants.py"
_WEIGHTS = "stages/weights/test_network.py"
_PROGRAMS = "stages/trajectories/test_programs.py"
_SCREEN = "api/dashboard/test_dashboard.py"

BOUNDARIES: Mapping[str, tuple[str, ...]] = {
    "a policy's output": (
        *_SANDBOX,
        "stages/rewards/test_gym_answers.py::test_no_more_than_an_expression_is_parsed",
        "stages/rewards/test_numbers.py::test_long_and_huge_texts_cost_little_and_equal_nothing",
        "stages/rewards/test_numbers.py::test_an_answer_that_is_too_large_to_compute_is_not_computed",
        "orchestration/rewards/test_math_verify.py::test_the_worker_has_a_sandbox_compute_what_a_model_or_a_row_wrote",
        "test_dangerous_calls.py",
        "api/terminal/test_screen.py",
        f"{_SCREEN}::test_every_field_of_a_sample_stays_text",
        f"{_SCREEN}::test_a_script_that_got_into_the_page_would_not_run",
    ),
    "a data set": (
        "orchestration/rewards/test_math_verify.py::test_the_worker_has_a_sandbox_compute_what_a_model_or_a_row_wrote",
        "orchestration/rewards/test_sandboxed.py",
        f"{_TENANTS}::test_a_check_takes_no_more_memory_than_it_may",
        "api/server/access/test_roots.py",
    ),
    "a model folder": (
        "api/server/access/test_roots.py",
        f"{_FOLDERS}::test_no_policy_executes_what_lies_in_its_model",
        "test_trust.py::test_models_are_loaded_without_code_of_their_folders",
        f"{_TENANTS}::test_an_endless_template_is_ended_with_its_client_and_delays_no_other",
        f"{_TENANTS}::test_a_template_without_end_or_measure_is_refused",
    ),
    "a checkpoint": (
        "orchestration/run/test_foreign_shards.py",
        f"{_FOLDERS}::test_no_command_executes_what_lies_in_a_run",
        f"{_FOLDERS}::test_the_run_of_another_user_is_resumed_only_if_it_is_trusted",
        f"{_FOLDERS}::test_a_pipe_in_a_run_is_named",
        f"{_STORE}::test_a_name_that_leads_out_of_its_checkpoint_is_refused",
        f"{_STORE}::test_a_size_that_is_none_is_refused",
        f"{_STORE}::test_a_file_that_is_larger_than_listed_is_not_copied",
        f"{_STORE}::test_folders_with_other_names_are_no_checkpoints",
        "test_trust.py::test_nothing_unpickles_what_a_file_says",
        "test_trust.py::test_torchs_own_reader_of_checkpoints_is_not_used",
    ),
    "user code": (
        "orchestration/run/test_stage_processes.py",
        "orchestration/run/test_user_environment.py",
        "orchestration/processes/test_environment.py",
        *_SANDBOX,
    ),
    "another user of the machine": (
        "api/test_other_users.py",
        "orchestration/run/test_readers.py",
        "orchestration/test_private_files.py",
        "pipeline/index/test_embedded_address.py::test_a_command_of_another_user_does_not_see_the_socket",
        f"{_WEIGHTS}::test_credentials_are_for_the_runs_user_alone",
    ),
    "the network": (
        "api/server/access/test_access.py",
        "api/server/access/test_connections.py",
        "pipeline/index/test_embedded_address.py",
        "pipeline/wire/test_fuzz.py",
        "pipeline/wire/test_handshake.py",
        "pipeline/wire/test_refusals.py",
        "pipeline/wire/test_services.py",
        "stages/training/test_rank_ports.py",
        "stages/training/test_rendezvous.py::test_a_process_without_the_secret_is_not_let_in",
        f"{_WEIGHTS}::test_an_engine_without_the_runs_secret_gets_nothing",
        f"{_WEIGHTS}::test_a_trainer_that_does_not_know_the_secret_is_not_believed",
        f"{_WEIGHTS}::test_no_message_of_a_stranger_stops_the_trainer",
        f"{_WEIGHTS}::test_a_proof_is_good_for_one_connection",
        f"{_WEIGHTS}::test_unproven_connections_keep_no_engine_out",
    ),
    "a token of scope read": (
        "api/server/access/test_access.py::test_a_token_opens_what_its_scope_says_and_no_more",
        "api/test_attacks.py",
        f"{_TENANTS}::test_one_tokens_endless_checks_leave_the_others_theirs",
        f"{_TENANTS}::test_a_check_takes_no_more_memory_than_it_may",
        f"{_TENANTS}::test_a_what_if_has_bounds_and_ends_with_its_client",
        f"{_TENANTS}::test_unread_streams_hold_little_memory_and_are_all_ended",
        f"{_TENANTS}::test_a_server_ends_while_a_what_if_computes",
    ),
    "a token of scope run": (
        "api/server/access/test_owners.py",
        "api/server/access/test_roots.py",
        "api/server/access/test_submission_policy.py",
        _TENANTS,
    ),
    "a key of Tinker's clients": (
        "api/tinker/test_values.py",
        "api/tinker/test_fuzz.py",
        *(
            f"stages/calls/test_custom.py::test_{attack}"
            for attack in (
                "what_a_loss_may_not_do_is_refused_before_it_takes_memory",
                "room_is_that_of_all_data_of_a_pass",
                "any_graph_is_run_or_refused_in_words",
            )
        ),
        *(
            f"api/tinker/test_messages.py::test_{attack}"
            for attack in (
                "a_tensor_that_lies_is_refused_by_its_place",
                "texts_that_are_not_utf8_are_refused",
                "many_empty_parts_are_refused_before_they_take_memory",
                "any_bytes_are_read_or_refused_in_words",
            )
        ),
        *(
            f"api/tinker/test_endpoints.py::test_{attack}"
            for attack in (
                "what_no_client_sends_is_a_clear_error",
                "another_token_sees_nothing",
                "too_many_calls_are_to_be_sent_again",
                "compressed_bodies_are_read_within_the_limit",
            )
        ),
    ),
    "an external worker": ("api/external/test_external_attacks.py",),
    "a program with a session": (
        "stages/environments/test_requests.py",
        f"{_PROGRAMS}::test_a_key_is_good_for_its_session_while_that_lasts",
        f"{_PROGRAMS}::test_special_tokens_of_a_program_are_text",
        f"{_PROGRAMS}::test_a_limit_ends_the_session_and_the_program_keeps_its_reward",
        "api/server/routes/test_sessions.py",
    ),
}


def boundaries_of(nodeid: str) -> list[str]:
    """The boundaries that the test ``nodeid`` attacks."""
    file, _, test = nodeid.removeprefix("tests/").partition("::")
    names = {file, f"{file}::{test.partition('[')[0]}"}
    return [boundary for boundary, tests in BOUNDARIES.items() if names.intersection(tests)]


def mark(items: Iterable[pytest.Item]) -> None:
    """Give tests of the hostile suite the mark ``attack``, and their reports the boundaries."""
    for item in items:
        if boundaries := boundaries_of(item.nodeid):
            item.add_marker("attack")
            item.user_properties += [("boundary", boundary) for boundary in boundaries]


def summary(stats: Mapping[str, list[pytest.TestReport]]) -> list[str]:
    """Lines that say for each boundary how many attacks held, failed, and could not be tried on
    this machine."""
    counts: Counter[tuple[str, str]] = Counter()
    for outcome, reports in stats.items():
        for report in reports:
            for name, boundary in getattr(report, "user_properties", ()):
                if name == "boundary" and outcome:
                    counts[boundary, "failed" if outcome == "error" else outcome] += 1
    width = max(map(len, BOUNDARIES))
    return [
        f"{boundary:{width}}  {counts[boundary, 'passed']:4} held, {counts[boundary, 'failed']} "
        f"did not, {counts[boundary, 'skipped']} were not tried here"
        for boundary in BOUNDARIES
    ]
