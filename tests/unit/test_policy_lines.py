"""Every line of the written policy in docs/billing.md has tests that hold it, by this list."""

import re
from pathlib import Path

PAGE = Path("docs/billing.md").read_text()
SECTIONS = (
    *("Tokens", "Before the work", "Every way out", "Retries", "Whose money is spent"),
    "The ledger",
)
FILES = {
    "store": "contract/test_ledger_store",
    "wire": "api/test_money_wire",
    "policy": "unit/test_billing_policy",
    "lives": "sim/test_whole_path",
    "claims": "contract/test_retries_paid_once",
    "hits": "sim/test_billed_hits",
    "retries": "api/test_money_retries",
    "rating": "unit/test_billing_rating",
    "ways": "api/test_ways_out",
    "kills": "crash/test_serve_kill",
    "machine": "sim/test_billing_machine",
    "rater": "contract/test_independent_rater",
    "cards": "unit/test_billing_cards",
    "faults": "contract/test_ledger_faults",
    "sync": "unit/test_ledger_sync",
    "tampering": "contract/test_audit_tampering",
    "engine": "sim/test_engine_machine",
    "servers": "crash/test_ledger_kill",
    "storage": "sim/test_storage_charges",
}
CLASSES = "rating:usage_of_the_engines_counts_adds_up_to_the_prompt"
COLUMNS = "tampering:a_change_of_any_column_is_named"
MODEL = "machine:the_ledger_does_what_the_model_says"
BY_LINE = "policy:every_way_out_is_billed_as_its_line_says_and_ends_the_hold"
GRANTED = "store:granted_money_is_spent_first_and_debt_is_paid_first"
AGAIN = "hits:what_is_computed_again_after_a_preemption_is_neither_a_hit_nor_billed_twice"
WHOLE = "engine:a_fully_cached_prompt_computes_one_token_and_writes_nothing"
CUT = "wire:an_answer_ends_where_the_money_or_the_limit_does"
DURABLE = "sync:a_settlement_waits_for_the_disk_and_a_hold_does_not"

# What a sentence of the page begins with, and the tests that fail when it is not so.
LINES = {
    "Every prompt token is in exactly one class": (CLASSES, "lives:whoever_comes_is_answered"),
    "A card may price more": (CLASSES,),
    "Storage, as": ("storage:each_started_hour", "storage:each_started_minute"),
    "`cache_write`, a surcharge": (WHOLE,),
    "`explicit_write` and": ("cards:a_shipped_card_charges_what_was_computed_by_hand",),
    "`explicit_hit`:": ("cards:an_explicit_hit_is_a_line_of_its_own",),
    "`unreported`:": ("rating:an_unreported_prompt_costs_what_the_card_says",),
    "Hits are what was served": (AGAIN,),
    "waiting for another request": ("hits:waiting_for_anothers_computation_is_a_hit",),
    "a block that was found and then failed": ("hits:a_block_that_failed_to_load_is_a_miss",),
    "tokens computed again after a preemption": (AGAIN,),
    "at least one token of a prompt": (WHOLE,),
    "Hits that together are fewer": ("rating:hits_below_the_minimum_cost_as_misses",),
    "A hold is taken for the whole prompt": (CUT, MODEL, "servers:what_may_be_spent_is_spent"),
    "A request whose hold does not fit": (
        *("wire:without_balance_nothing_is_computed", "store:the_gate_refuses"),
    ),
    "A request that was admitted is settled exactly once": (
        *(BY_LINE, "wire:every_way_out_is_in_the_ledger_once"),
    ),
    "| `finished`": ("wire:a_charge_is_exact",),
    "| `budget`": (CUT,),
    "| `client_gone`": ("wire:a_client_that_leaves_pays_for_what_was_made",),
    "| `failed`": ("wire:a_failure_before_the_first_token_costs_nothing",),
    "| `crashed`": (MODEL, "kills:after_kill_9_under_load_every_answer_was_paid_once"),
    "| `lapsed`": (MODEL, "wire:a_hold_that_lapses_is_the_servers_failure"),
    "The settlement is durable before the last bytes": (
        *("ways:the_settlement_stands_before_the_last_bytes", DURABLE),
    ),
    "Progress is recorded with each top-up": ("wire:the_journal_says_what_was_sent",),
    "If a server thought dead comes back": ("store:a_late_word_that_bills_less",),
    "An answer that the server could not write": ("wire:an_answer_that_we_fail_to_write",),
    "What was used and not billed stays": (BY_LINE,),
    "A prepaid balance can go below zero only": (MODEL,),
    "With `Idempotency-Key`": (
        *(
            "claims:an_idempotency_key_replays_conflicts_and_expires",
            "retries:a_key_gets_the_first",
        ),
        *("retries:a_key_whose_request_runs_is_busy", "claims:a_key_whose_server_died_is_free"),
    ),
    "Clients retry silently": (
        *("retries:a_silent_retry_of_an_undelivered_answer", "ways:a_client_that_leaves_pays"),
        *("claims:a_retry_a_day_later_is_a_request", "claims:an_answer_and_its_retry_are_paid"),
    ),
    "1. Granted money": (
        *("rater:an_independent_rater_agrees_with_every_charge", GRANTED),
        "store:a_correction_gives_back_no_more_than_is_left_of_its_charge",
        "policy:a_correction_gives_back_paid_money_first_and_granted_money_last",
    ),
    "Money that is paid in settles": (GRANTED,),
    "Entries are double entry": ("store:the_database_refuses_to_change_an_entry",),
    "`cachesvc ledger verify` needs only": (COLUMNS, "tampering:a_tail_that_was_cut_is_found"),
    "The admin trail proves": (COLUMNS,),
    "The proof does not cover what is not money yet": (COLUMNS,),
    "the owner, lease and progress": (COLUMNS,),
    "stored answers, and notes": (COLUMNS,),
    "how far exports have come": (COLUMNS,),
    "the secret and digests of keys": (COLUMNS,),
    "when a project": (COLUMNS,),
    "`tests/contract/test_audit_tampering.py`": (COLUMNS,),
    "SQLite": (DURABLE,),
    "The ledger closes if": (
        *("sync:after_a_disk_has_failed_once", "sync:files_that_are_removed_or_cut"),
        "sync:a_full_disk_is_called_one_and_costs_nothing",
    ),
    "The log is extended": ("sync:a_lengthened_log_is_read_like_any_other",),
    "With PostgreSQL several": (
        *("store:another_servers_holds_are_left_alone", "faults:a_second_server_of_a_name"),
    ),
}


def policy_lines():
    """The paragraphs, bullets and table rows of the policy's sections, each on one line."""
    lines = []
    for section in SECTIONS:
        text = re.split(r"^## ", PAGE.split(f"\n## {section}\n", 1)[1], flags=re.MULTILINE)[0]
        for part in re.split(r"\n\n|\n(?=- |\| )", text.strip()):
            line = " ".join(part.removeprefix("- ").split())
            if line and not line.startswith(("| ---", "| outcome")):
                lines.append(line)
    return lines


def test_each_line_of_the_policy_has_its_tests_and_no_name_is_left_over():
    lines = policy_lines()
    found = {line: [start for start in LINES if line.startswith(start)] for line in lines}
    assert [] == [line for line, starts in found.items() if len(starts) != 1]
    assert set(LINES) == {start for [start] in found.values()}


def test_the_tests_that_are_named_exist():
    missing = []
    for name in {name for names in LINES.values() for name in names}:
        file, _, function = name.partition(":")
        text = Path(f"tests/{FILES[file]}.py").read_text()
        if 1 != len(re.findall(rf"def test_{function}\w*\(", text)):
            missing.append(name)
    assert [] == missing
