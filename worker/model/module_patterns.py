"""Regular expressions from a checkpoint, matched in bounded time.

`re` tries one way after another, and an expression of ten characters can make it try for hours. Here an expression becomes an automaton that is in all of its
states at once (Thompson, 1968), so that a name takes steps by its length, and sets of states are remembered as they are met. References to groups, looking back, word
boundaries and flags are refused. Where this answers at all, it answers as `re.match` does.
"""

import re
from dataclasses import dataclass, field

MAX_LENGTH = 500
_MAX_STATES = 4096  # repetitions with counts are written out
_MAX_STEPS = 200_000  # states passed for one name; an expression without looks ahead takes fewer than a thousandth once its sets are known
_MAX_SETS = 4096
_MAX_DEPTH = 40
# One character's worth: a set, an escape, or the character itself. What stands for one character can't run away: `re` reads it.
_ONE = re.compile(r"\[\^?+\]?+(?:\\.|[^\]\\\[])*\]|\\.|[^\\\[]", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:[dDsSwW]|[^a-zA-Z0-9])", re.DOTALL)
_SET_OPERATION = re.compile(r"--|&&|~~|\|\|")
_COUNT = re.compile(r"\{(?=\d|,)(\d*)(?:(,)(\d*))?\}")
_GROUP = re.compile(r"\((?:\?(?::|P<[A-Za-z_]\w*>|([=!])))?(?!\?)")


class PatternError(ValueError):
    """An expression that isn't one, or that isn't supported; one line that says which part."""


@dataclass(slots=True)
class _State:
    """One state. Those without a character are passed at once, if their condition holds."""

    to: list[int] = field(default_factory=list)
    character: re.Pattern[str] | None = None
    anchor: str = ""  # "^" or "$"
    ahead: "ModulePattern | None" = None
    is_negated: bool = False
    is_end: bool = False


@dataclass(slots=True, eq=False)
class _Set:
    """Some states that wait for a character, whether the end is among them, and the sets that characters lead to."""

    states: frozenset[int]
    is_end: bool
    after: "dict[str, _Set]" = field(default_factory=dict)


@dataclass(slots=True)
class _Run:
    """A name on its way: what looks ahead saw, by their first state and place, and how many states were passed."""

    name: str
    looks: dict[tuple[int, int], bool] = field(default_factory=dict)
    num_steps: int = 0


class ModulePattern:
    """A compiled expression. Raises PatternError."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise PatternError(f"has {len(text)} characters; {MAX_LENGTH} are allowed")
        parser = _Parser(text)
        self._start = parser.parse()
        self._states = parser.states
        self._sets: dict[frozenset[int], _Set] = {}

    @classmethod
    def part(cls, states: list[_State], start: int) -> "ModulePattern":
        """An expression inside another one, in whose states it lies."""
        made = cls.__new__(cls)
        made._states, made._start, made._sets = states, start, {}
        return made

    def matches(self, name: str) -> bool:
        """Whether the expression matches at the beginning of a name. Raises PatternError if that takes too long."""
        return self._matches(_Run(name), 0)

    def _matches(self, run: _Run, place: int) -> bool:
        name = run.name
        found, _ = self._reached([self._start], run, place)
        last = len(name) - 2  # from here on `$` may hold after the next character
        while not found.is_end:
            if place == len(name) or not found.states:
                return False
            following = found.after.get(name[place]) if place < last else None
            found = following or self._after(found, run, place)
            place += 1
        return True

    def _after(self, now: _Set, run: _Run, place: int) -> _Set:
        """The states after one more character; remembered where they depend on nothing else."""
        passed = [
            following
            for state in now.states
            if (character := self._states[state].character) and character.fullmatch(run.name[place])
            for following in self._states[state].to
        ]
        found, has_looked = self._reached(passed, run, place + 1)
        if not has_looked and place < len(run.name) - 2:
            now.after[run.name[place]] = found
        return found

    def _reached(self, first: list[int], run: _Run, place: int) -> tuple[_Set, bool]:
        """States that wait for a character or are the end, from these on; and whether a look ahead had to be asked."""
        seen, waiting, found = set(first), list(first), set()
        has_looked = False
        while waiting:
            number = waiting.pop()
            state = self._states[number]
            has_looked |= state.ahead is not None
            if state.character or state.is_end:
                found.add(number)
            elif self._holds(state, run, place):
                fresh = [following for following in state.to if following not in seen]
                seen.update(fresh)
                waiting.extend(fresh)
        run.num_steps += len(seen)
        if run.num_steps > _MAX_STEPS:
            raise PatternError("takes too long")
        return self._kept(frozenset(found)), has_looked

    def _kept(self, states: frozenset[int]) -> _Set:
        kept = self._sets.get(states)
        if kept is None:
            if len(self._sets) >= _MAX_SETS:
                self._sets.clear()
            kept = self._sets[states] = _Set(states, any(self._states[state].is_end for state in states))
        return kept

    def _holds(self, state: _State, run: _Run, place: int) -> bool:
        if state.anchor == "^":
            return place == 0
        if state.anchor == "$":
            return place == len(run.name) or run.name[place:] == "\n"
        if state.ahead is None:
            return True
        key = (state.ahead._start, place)
        if key not in run.looks:
            run.looks[key] = state.ahead._matches(run, place)
        return run.looks[key] is not state.is_negated


class _Parser:
    """From text to states: recursive descent, in the order of `re`'s own grammar."""

    def __init__(self, text: str) -> None:
        self.states: list[_State] = []
        self._text = text
        self._place = 0
        self._depth = 0

    def parse(self) -> int:
        """The first state of the whole."""
        start, ends = self._alternatives()
        if self._place < len(self._text):
            raise PatternError("has a ')' without a '('")
        self._join(ends, self._add(_State(is_end=True)))
        return start

    def _add(self, state: _State) -> int:
        if len(self.states) >= _MAX_STATES:
            raise PatternError(f"becomes more than {_MAX_STATES} states")
        self.states.append(state)
        return len(self.states) - 1

    def _join(self, ends: list[int], to: int) -> None:
        for end in ends:
            self.states[end].to.append(to)

    def _peek(self) -> str:
        return self._text[self._place : self._place + 1]

    def _alternatives(self) -> tuple[int, list[int]]:
        """States of `a|b|c`: where they begin, and those that lack what follows."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"is nested more than {_MAX_DEPTH} deep")
        fork = self._add(_State())
        ends: list[int] = []
        while True:
            start, part = self._sequence()
            self.states[fork].to.append(start)
            ends += part
            if self._peek() != "|":
                break
            self._place += 1
        self._depth -= 1
        return fork, ends

    def _sequence(self) -> tuple[int, list[int]]:
        start = self._add(_State())
        ends = [start]
        while self._peek() not in ("", "|", ")"):
            first, part = self._repeated()
            self._join(ends, first)
            ends = part
        return start, ends

    def _repeated(self) -> tuple[int, list[int]]:
        """An item with its quantifier. A lazy one matches the same names."""
        begin = self._place
        item = self._item()
        after = self._place
        counts = self._quantifier()
        if counts is None:
            return item
        if self._text[begin] in "^$":
            raise PatternError("repeats nothing")
        end = self._place
        least, most = counts
        start = self._add(_State())
        ends, skipped = [start], list[int]()
        for number in range(least if most is None else most):
            first, part = item if number == 0 else self._again(begin, after)
            self._join(ends, first)
            if number >= least:
                skipped += ends
            ends = part
        if most is None:
            first, part = item if least == 0 else self._again(begin, after)
            loop = self._add(_State(to=[first]))
            self._join([*ends, *part], loop)
            ends = [loop]
        self._place = end
        return start, ends + skipped

    def _again(self, begin: int, after: int) -> tuple[int, list[int]]:
        """The states of an item once more, for one that is repeated."""
        self._place = begin
        item = self._item()
        assert self._place == after
        return item

    def _quantifier(self) -> tuple[int, int | None] | None:
        """The least and most repetitions, None for no end."""
        counts: tuple[int, int | None]
        if self._peek() and self._peek() in "*+?":
            counts = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self._peek()]
            self._place += 1
        elif match := _COUNT.match(self._text, self._place):
            least = int(match[1] or 0)
            counts = least, (int(match[3]) if match[3] else None) if match[2] else least
            self._place = match.end()
        else:
            return None
        if counts[1] is not None and counts[1] < counts[0]:
            raise PatternError("repeats more at least than at most")
        if self._peek() == "?":
            self._place += 1
        elif self._peek() and (self._peek() in "*+" or _COUNT.match(self._text, self._place)):
            raise PatternError("has two quantifiers in a row")
        return counts

    def _item(self) -> tuple[int, list[int]]:
        head = self._peek()
        if head == "(":
            return self._group()
        if head in "*+?":
            raise PatternError("repeats nothing")
        if head in "^$":
            self._place += 1
            state = self._add(_State(anchor=head))
            return state, [state]
        match = _ONE.match(self._text, self._place)
        one = match[0] if match else ""
        is_refused = (one[:1] == "\\" and not _ESCAPE.fullmatch(one)) or (
            one[:1] == "[" and _SET_OPERATION.search(one) is not None
        )
        if match is None or is_refused:
            raise PatternError(f"has {self._text[self._place : self._place + 10]!r}, which is not supported")
        try:
            state = self._add(_State(character=re.compile(one if one[:1] in "[\\." else re.escape(one))))
        except (re.error, OverflowError):
            raise PatternError(f"has {one[:40]!r}, which is no set") from None
        self._place = match.end()
        return state, [state]

    def _group(self) -> tuple[int, list[int]]:
        match = _GROUP.match(self._text, self._place)
        if match is None:
            raise PatternError(f"has {self._text[self._place : self._place + 10]!r}, which is not supported")
        self._place = match.end()
        start, ends = self._alternatives()
        if self._peek() != ")":
            raise PatternError("has a '(' without a ')'")
        self._place += 1
        if not match[1]:
            return start, ends
        self._join(ends, self._add(_State(is_end=True)))
        state = self._add(_State(ahead=ModulePattern.part(self.states, start), is_negated=match[1] == "!"))
        return state, [state]
