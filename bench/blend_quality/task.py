"""A task whose answers need two documents.

A document has statements of one token each. ``x = v`` gives variable x a value; ``e := x`` lets
entity e have the value that x has *there*; the rest is filler. A question asks for an entity's
value. Where the document of ``e := x`` gives x no value before, the answer needs the last document
before it that does. Variables get values again and again, so a question alone cannot find it: the
token ``e := x`` must have seen the documents before its own. Its cached KV has seen others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvass.types import I64Array

VARIABLES, VALUES, ENTITIES, FILLERS = 4, 16, 16, 16
DOCUMENTS, LENGTH, PREFIX, QUESTIONS = 4, 24, 8, 8
"""Documents in a prompt, tokens of one, tokens of the exact prefix, questions at the end."""
GIVEN, TAKEN = 2, 4
"""Statements ``x = v`` and ``e := x`` in a document."""

FILLER = 2
GIVES = FILLER + FILLERS
TAKES = GIVES + VARIABLES * VALUES
ASKS = TAKES + ENTITIES * VARIABLES
VALUE = ASKS + ENTITIES
VOCABULARY = VALUE + VALUES
"""First token of each kind; 0 begins a prompt, 1 a document."""
TOKENS = PREFIX + DOCUMENTS * LENGTH + QUESTIONS
NO_LABEL = -100


def prefix(random: np.random.Generator) -> I64Array:
    """[PREFIX] tokens: every variable has some value."""
    tokens = random.integers(FILLER, GIVES, PREFIX)
    tokens[0] = 0
    values = random.integers(0, VALUES, VARIABLES)
    at = 1 + random.permutation(PREFIX - 1)[:VARIABLES]
    tokens[at] = GIVES + np.arange(VARIABLES) * VALUES + values
    return tokens


def document(random: np.random.Generator, slot: int) -> I64Array:
    """[LENGTH] tokens. Documents of different slots share no entity."""
    tokens = random.integers(FILLER, GIVES, LENGTH)
    tokens[0] = 1
    at = 1 + random.permutation(LENGTH - 1)[: GIVEN + TAKEN]
    given = random.permutation(VARIABLES)[:GIVEN]
    tokens[at[:GIVEN]] = GIVES + given * VALUES + random.integers(0, VALUES, GIVEN)
    each = ENTITIES // DOCUMENTS
    entities = slot * each + random.permutation(each)[:TAKEN]
    taken = random.integers(0, VARIABLES, TAKEN)
    tokens[at[GIVEN:]] = TAKES + entities * VARIABLES + taken
    return tokens


@dataclass(frozen=True)
class Asked:
    """A prompt and its ``labels``, both [tokens]: the value at each ``e := x`` and each question,
    ``NO_LABEL`` elsewhere."""

    tokens: I64Array
    labels: I64Array


def ask(random: np.random.Generator, parts: list[I64Array], across: bool) -> Asked:
    """The prompt of ``parts`` (prefix, documents) and questions; ``across``: only such whose answer
    needs two documents, where there are enough of them."""
    body = np.concatenate(parts)
    labels = np.full(len(body), NO_LABEL)
    now, where = np.zeros((2, VARIABLES), np.int64)
    found: list[tuple[int, int, bool]] = []
    for at, token in enumerate(body):
        if GIVES <= token < TAKES:
            x, v = divmod(int(token) - GIVES, VALUES)
            now[x], where[x] = v, at
        elif TAKES <= token < ASKS:
            e, x = divmod(int(token) - TAKES, VARIABLES)
            labels[at] = VALUE + now[x]
            start = at - (at - PREFIX) % LENGTH
            found.append((e, int(now[x]), bool(where[x] < start)))
    order = [found[i] for i in random.permutation(len(found))]
    if across:
        order.sort(key=lambda one: not one[2])
    questions = np.array([(ASKS + e, VALUE + v) for e, v, _ in order[:QUESTIONS]])
    return Asked(
        *(np.append(*both) for both in ((body, questions[:, 0]), (labels, questions[:, 1])))
    )


def prompt(random: np.random.Generator, documents: int = DOCUMENTS) -> Asked:
    """For training."""
    slots = random.permutation(DOCUMENTS)[:documents]
    return ask(random, [prefix(random), *(document(random, int(s)) for s in slots)], False)
