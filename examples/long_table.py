"""A long table of people, asked for one person's age and then for another's.

    python examples/long_table.py

Both questions begin with the same 1,950 tokens. The first computes them, the second finds them.
"""

import time

from cachesvc import LLM, SamplingParams

NAMES = [
    "Ada",
    "Bela",
    "Cleo",
    "Dora",
    "Emil",
    "Finn",
    "Gita",
    "Hugo",
    "Iris",
    "Jona",
    "Kira",
    "Liam",
    "Mona",
    "Nils",
    "Olga",
    "Paul",
]
TOWNS = ["Bern", "Graz", "Lund", "Nice", "Oslo", "Pisa", "Riga", "Turin"]
WORKS = ["baker", "doctor", "farmer", "lawyer", "painter", "pilot", "teacher"]


def table(num_rows: int) -> str:
    rows = ["| Id | Name | Age | Town | Work |", "|---|---|---|---|---|"]
    for i in range(num_rows):
        name = f"{NAMES[i % len(NAMES)]} {chr(65 + i // len(NAMES))}."
        age, town, work = 20 + i * 37 % 60, TOWNS[i * 5 % len(TOWNS)], WORKS[i * 3 % len(WORKS)]
        rows.append(f"| {i + 1} | {name} | {age} | {town} | {work} |")
    return "\n".join(rows)


def ask(llm: LLM, people: str, name: str) -> None:
    messages = [
        {"role": "system", "content": f"You answer questions about this table.\n\n{people}"},
        {"role": "user", "content": f"How old is {name}?"},
    ]
    start = time.perf_counter()
    [answer] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=16))
    elapsed_s = time.perf_counter() - start
    print(f"{name}  {elapsed_s:.2f} s, first token after {answer.metrics.ttft_s:.2f} s")
    print(f"  {answer.num_cached_tokens} of {len(answer.prompt_token_ids)} tokens hit", end=": ")
    print(", ".join(f"{tier} {hits}" for tier, hits in answer.hit_tokens.items()))
    print(f"  {answer.outputs[0].text.strip()}")


def main() -> None:
    people = table(100)
    with LLM(model="smollm2-135m", enable_prefix_caching=True) as llm:
        ask(llm, people, "Hugo C.")
        ask(llm, people, "Olga B.")


if __name__ == "__main__":
    main()
