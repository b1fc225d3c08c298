"""Finds stop strings wherever token borders fall.

All strings are searched at once by an Aho-Corasick automaton, one transition per character however many strings there
are. Its depth after a character is the length of the longest suffix of the text that begins some stop string, which is
exactly what must be held back.

References
----------
Aho, Corasick 1975, "Efficient string matching: an aid to bibliographic search", sections 2-3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.errors import InvalidRequest

# The automaton takes about 0.3 KB per character.
MAX_STOP_CHARACTERS = 65_536


class StopAutomaton:
    """Holds compiled stop strings; immutable, so one serves any number of texts.

    Raises
    ------
    InvalidRequest
        An empty string, or more than ``MAX_STOP_CHARACTERS`` characters in all.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise InvalidRequest("stop", "stop has an empty string, which every text contains; leave it out.")
        total = sum(map(len, strings))
        if total > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                "stop", f"stop has {total} characters in all; at most {MAX_STOP_CHARACTERS} are searched for."
            )
        self.next: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.depth = [0]
        self.matched = [0]  # length of the longest stop string that ends here, 0 if none
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        node = 0
        for char in string:
            if char not in self.next[node]:
                self.next[node][char] = len(self.next)
                self.next.append({})
                self.fail.append(0)
                self.depth.append(self.depth[node] + 1)
                self.matched.append(0)
            node = self.next[node][char]
        self.matched[node] = len(string)

    def _link(self) -> None:
        """Link breadth first: a node fails over to the longest proper suffix that is itself a node."""
        queue = deque(self.next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.next[node].items():
                self.fail[child] = self.step(self.fail[node], char)
                queue.append(child)
            self.matched[node] = self.matched[node] or self.matched[self.fail[node]]

    def step(self, node: int, char: str) -> int:
        """Return the node after one more character."""
        while node and char not in self.next[node]:
            node = self.fail[node]
        return self.next[node].get(char, 0)


class StopSearch:
    """Searches one text. Of several matches the one that ends first counts, of those the longest: ``found``."""

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._node = 0
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def push(self, text: str) -> str:
        """Return the text that may be shown now. After a match ``stopped`` is True and nothing more is ever shown."""
        if self.stopped:
            return ""
        automaton, node = self._automaton, self._node
        self._held += text
        for index, char in enumerate(text, start=len(self._held) - len(text) + 1):
            node = automaton.step(node, char)
            if automaton.matched[node]:
                begin = index - automaton.matched[node]
                shown, self.found, self._held = self._held[:begin], self._held[begin:index], ""
                return shown
        self._node = node
        keep = automaton.depth[node]
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """Return what was held back, once the text has ended without a match."""
        rest, self._held, self._node = self._held, "", 0
        return rest
