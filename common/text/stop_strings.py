"""Ends a text at a stop string."""


class StopString:
    """How much of one stop string a text ends with, by Knuth, Morris and Pratt; a character costs about one step."""

    def __init__(self, stop: str) -> None:
        self.text = stop
        self.met = 0  # characters of it that the text ends with; less than all
        self._borders = [0, 0]  # by prefix length: its longest proper beginning that is also its end; as far as needed

    def push(self, text: str, armed: bool) -> int | None:
        """Where in the new text it is first complete, as the index behind it. Not armed: it never is."""
        stop, met, borders = self.text, self.met, self._borders
        if not met and stop[0] not in text:
            return None
        at, end, size = 0, len(text), len(stop)
        while at < end:
            if text[at] == stop[met]:
                met += 1
                at += 1
                if met < size:
                    continue
                if armed:
                    return at
            elif not met:
                at = text.find(stop[0], at)
                if at < 0:
                    break
                continue
            if met >= len(borders):
                self._extend(met)
            met = borders[met]
        self.met = met
        return None

    def _extend(self, length: int) -> None:
        borders, stop = self._borders, self.text
        while len(borders) <= length:
            border, char = borders[-1], stop[len(borders) - 1]
            while border and stop[border] != char:
                border = borders[border]
            borders.append(border + (stop[border] == char))


class StopChecker:
    """Ends a text at the stop string that is complete first, wherever the pieces were cut."""

    def __init__(self, stop: tuple[str, ...], include: bool) -> None:
        """include: the text ends after the stop string, not before it."""
        self._stops = [StopString(text) for text in stop]
        self._include = include
        self._held = ""  # may be the beginning of a stop string
        self._stopped: str | None = None

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """What can go out, and the stop string that was met, if one was. armed: one that ends in this text counts."""
        if self._stopped is not None or not self._stops:
            return ("", self._stopped) if self._stopped is not None else (text, None)
        known = len(self._held)
        found = [(known + end, known + end - len(stop.text), stop.text)
                 for stop in self._stops if (end := stop.push(text, armed)) is not None]  # fmt: skip
        text = self._held + text
        if found:
            end, start, self._stopped = min(found)
            self._held = ""
            return text[: end if self._include else start], self._stopped
        cut = len(text) - max(stop.met for stop in self._stops)
        self._held = text[cut:]
        return text[:cut], None

    def finish(self) -> str:
        """What was held back, when nothing comes after it."""
        held, self._held = self._held, ""
        return held
