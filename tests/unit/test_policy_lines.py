"""Every line of the written policy in docs/billing.md has tests that hold it, by this list."""

import re
from pathlib import Path

import pytest

PAGE = Path("docs/billing.md").read_text()
SECTIONS = (
    "Tokens",
    "Before the work",
    "Every way out",
    "Retries",
    "Whose money is spent",
    "The ledger",
)
STORE, WIRE = "tests/contract/test_ledger_store.py", "tests/api/test_money_wire.py"
POLICY, LIVES = "tests/unit/test_billing_policy.py", "tests/sim/test_whole_path.py"
CLAIMS, HITS = "tests/contract/test_retries_paid_once.py", "tests/sim/test_billed_hits.py"
WIRE_RETRIES = "tests/api/test_money_retries.py"
RATING, WAYS = "tests/unit/test_billing_rating.py", "tests/api/test_ways_out.py"
KILLS, MACHINE = "tests/crash/test_serve_kill.py", "tests/sim/test_billing_machine.py"
RATER = "tests/contract/test_independent_rater.py"
SHAPES, FAULTS = "tests/unit/test_billing_cards.py", "tests/contract/test_ledger_faults.py"
COLUMNS = "test_a_change_of_any_column_is_named"
SYNC, TAMPERING = "tests/unit/test_ledger_sync.py", "tests/contract/test_audit_tampering.py"
ENGINE, SERVERS = "tests/sim/test_engine_machine.py", "tests/crash/test_ledger_kill.py"

# By section: what a sentence of it begins with, and the tests that fail when it is not so.
LINES: dict[str, list[str]] = {
    "Every prompt token is in exactly one class": [
        f"{RATING}::test_usage_of_the_engines_counts_adds_up_to_the_prompt",
        f"{LIVES}::test_whoever_comes_is_answered_exactly_and_billed_once",
    ],
    "A card may price more": [f"{RATING}::test_usage_of_the_engines_counts_adds_up_to_the_prompt"],
    "Storage, as": [
        "tests/sim/test_storage_charges.py::test_each_started_hour_is_charged_when_it_begins",
        "tests/sim/test_storage_charges.py::test_each_started_minute_is_charged_where_the_card_says_so",
    ],
    "`cache_write`, a surcharge": [
        f"{ENGINE}::test_a_fully_cached_prompt_computes_one_token_and_writes_nothing"
    ],
    "`explicit_write` and": [f"{SHAPES}::test_a_shipped_card_charges_what_was_computed_by_hand"],
    "`explicit_hit`:": [f"{SHAPES}::test_an_explicit_hit_is_a_line_of_its_own"],
    "`unreported`:": [
        f"{RATING}::test_an_unreported_prompt_costs_what_the_card_says_and_saves_nothing"
    ],
    "Hits are what was served": [
        f"{HITS}::test_what_is_computed_again_after_a_preemption_is_neither_a_hit_nor_billed_twice"
    ],
    "waiting for another request": [f"{HITS}::test_waiting_for_anothers_computation_is_a_hit"],
    "a block that was found and then failed": [
        f"{HITS}::test_a_block_that_failed_to_load_is_a_miss"
    ],
    "tokens computed again after a preemption": [
        f"{HITS}::test_what_is_computed_again_after_a_preemption_is_neither_a_hit_nor_billed_twice"
    ],
    "at least one token of a prompt": [
        f"{ENGINE}::test_a_fully_cached_prompt_computes_one_token_and_writes_nothing"
    ],
    "Hits that together are fewer": [
        f"{RATING}::test_hits_below_the_minimum_cost_as_misses_and_stay_hits_in_the_usage"
    ],
    "A hold is taken for the whole prompt": [
        f"{WIRE}::test_an_answer_ends_where_the_money_or_the_limit_does",
        f"{MACHINE}::test_the_ledger_does_what_the_model_says",
        f"{SERVERS}::test_what_may_be_spent_is_spent_to_its_last_request_and_never_passed",
    ],
    "A request whose hold does not fit": [
        f"{WIRE}::test_without_balance_nothing_is_computed",
        f"{STORE}::test_the_gate_refuses_what_the_balance_does_not_cover",
    ],
    "A request that was admitted is settled exactly once": [
        f"{POLICY}::test_every_way_out_is_billed_as_its_line_says_and_ends_the_hold",
        f"{WIRE}::test_every_way_out_is_in_the_ledger_once",
    ],
    "| `finished`": [f"{WIRE}::test_a_charge_is_exact"],
    "| `budget`": [f"{WIRE}::test_an_answer_ends_where_the_money_or_the_limit_does"],
    "| `client_gone`": [f"{WIRE}::test_a_client_that_leaves_pays_for_what_was_made"],
    "| `failed`": [f"{WIRE}::test_a_failure_before_the_first_token_costs_nothing"],
    "| `crashed`": [
        f"{MACHINE}::test_the_ledger_does_what_the_model_says",
        f"{KILLS}::test_after_kill_9_under_load_every_answer_was_paid_once",
    ],
    "| `lapsed`": [
        f"{MACHINE}::test_the_ledger_does_what_the_model_says",
        f"{WIRE}::test_a_hold_that_lapses_is_the_servers_failure",
    ],
    "The settlement is durable before the last bytes": [
        f"{WAYS}::test_the_settlement_stands_before_the_last_bytes",
        "tests/unit/test_ledger_sync.py::test_a_settlement_waits_for_the_disk_and_a_hold_does_not",
    ],
    "Progress is recorded with each top-up": [f"{WIRE}::test_the_journal_says_what_was_sent"],
    "If a server thought dead comes back": [
        f"{STORE}::test_a_late_word_that_bills_less_gives_back_what_no_admin_has"
    ],
    "An answer that the server could not write": [
        f"{WIRE}::test_an_answer_that_we_fail_to_write_costs_nothing"
    ],
    "What was used and not billed stays": [
        f"{POLICY}::test_every_way_out_is_billed_as_its_line_says_and_ends_the_hold"
    ],
    "A prepaid balance can go below zero only": [
        f"{MACHINE}::test_the_ledger_does_what_the_model_says",
    ],
    "With `Idempotency-Key`": [
        f"{CLAIMS}::test_an_idempotency_key_replays_conflicts_and_expires",
        f"{WIRE_RETRIES}::test_a_key_gets_the_first_answer_again_and_pays_once",
        f"{WIRE_RETRIES}::test_a_key_whose_request_runs_is_busy_and_one_that_failed_is_free",
        f"{CLAIMS}::test_a_key_whose_server_died_is_free_at_once_and_its_request_pays_once",
    ],
    "Clients retry silently": [
        f"{WIRE_RETRIES}::test_a_silent_retry_of_an_undelivered_answer_pays_once",
        f"{WAYS}::test_a_client_that_leaves_pays_for_what_was_computed",
        f"{CLAIMS}::test_a_retry_a_day_later_is_a_request_of_its_own",
        f"{CLAIMS}::test_an_answer_and_its_retry_are_paid_once",
    ],
    "1. Granted money": [
        f"{RATER}::test_an_independent_rater_agrees_with_every_charge",
        f"{STORE}::test_granted_money_is_spent_first_and_debt_is_paid_first",
        f"{STORE}::test_a_correction_gives_back_no_more_than_is_left_of_its_charge",
        f"{POLICY}::test_a_correction_gives_back_paid_money_first_and_granted_money_last",
    ],
    "Money that is paid in settles": [
        f"{STORE}::test_granted_money_is_spent_first_and_debt_is_paid_first",
    ],
    "Entries are double entry": [
        f"{STORE}::test_the_database_refuses_to_change_an_entry",
    ],
    "`cachesvc ledger verify` needs only": [
        f"{TAMPERING}::{COLUMNS}",
        f"{TAMPERING}::test_a_tail_that_was_cut_is_found_by_its_head",
    ],
    "The admin trail proves": [f"{TAMPERING}::{COLUMNS}"],
    "The proof does not cover what is not money yet": [f"{TAMPERING}::{COLUMNS}"],
    "the owner, lease and progress": [f"{TAMPERING}::{COLUMNS}"],
    "stored answers, and notes": [f"{TAMPERING}::{COLUMNS}"],
    "how far exports have come": [f"{TAMPERING}::{COLUMNS}"],
    "the secret and digests of keys": [f"{TAMPERING}::{COLUMNS}"],
    "when a project": [f"{TAMPERING}::{COLUMNS}"],
    "`tests/contract/test_audit_tampering.py`": [f"{TAMPERING}::{COLUMNS}"],
    "SQLite": [f"{SYNC}::test_a_settlement_waits_for_the_disk_and_a_hold_does_not"],
    "The ledger closes if": [
        f"{SYNC}::test_after_a_disk_has_failed_once_nothing_is_written_until_a_restart",
        f"{SYNC}::test_files_that_are_removed_or_cut_close_the_ledger",
        f"{SYNC}::test_a_full_disk_is_called_one_and_costs_nothing_once_there_is_room",
    ],
    "The log is extended": [f"{SYNC}::test_a_lengthened_log_is_read_like_any_other"],
    "With PostgreSQL several": [
        f"{STORE}::test_another_servers_holds_are_left_alone_until_their_lease_ends",
        f"{FAULTS}::test_a_second_server_of_a_name_is_refused_while_the_first_runs",
    ],
}


def policy_lines() -> list[str]:
    """The paragraphs, bullets and table rows of the policy's sections, each on one line."""
    lines = []
    for section in SECTIONS:
        text = re.split(r"^## ", PAGE.split(f"\n## {section}\n", 1)[1], flags=re.MULTILINE)[0]
        for part in re.split(r"\n\n|\n(?=- |\| )", text.strip()):
            line = " ".join(part.removeprefix("- ").split())
            if line and not line.startswith(("| ---", "| outcome")):
                lines.append(line)
    return lines


@pytest.mark.parametrize("line", policy_lines())
def test_a_line_of_the_policy_has_its_tests(line: str) -> None:
    found = [names for start, names in LINES.items() if line.startswith(start)]
    assert len(found) == 1, f"no test is named for: {line}"


def test_the_tests_that_are_named_exist() -> None:
    missing = []
    for name in {name for names in LINES.values() for name in names}:
        path, _, function = name.partition("::")
        if not re.search(rf"def {function}\w*\(", Path(path).read_text()):
            missing.append(name)
    assert [] == missing


def test_no_name_is_left_over() -> None:
    lines = policy_lines()
    assert [] == [s for s in LINES if not any(line.startswith(s) for line in lines)]
