"""Who still reads what the next update changes, and how long updates have waited for them."""

from __future__ import annotations

import torch


class StillRead:
    """Events of one device that its next update comes after. The host waits for none of them."""

    def __init__(self) -> None:
        self._events: list[torch.Event] = []
        self._waits: list[tuple[torch.Event, torch.Event]] = []
        """Before and after each wait."""

    def until(self, event: torch.Event) -> None:
        """Somebody reads until then."""
        self._events.append(event)

    def wait(self, device: torch.device) -> None:
        """What the current stream does from now on comes after all of them."""
        if not self._events:
            return
        stream = torch.accelerator.current_stream(device)
        began, ended = (torch.Event(device, enable_timing=True) for _ in range(2))
        stream.record_event(began)
        for event in self._events:
            stream.wait_event(event)
        stream.record_event(ended)
        self._events.clear()
        self._waits.append((began, ended))

    @property
    def is_known(self) -> bool:
        """The device has come to an update after the last event."""
        return not self._events and all(ended.query() for _, ended in self._waits)

    def waited_s(self) -> float:
        """How long the device had nothing else to do, in waits that no call told of yet."""
        known = [wait for wait in self._waits if wait[1].query()]
        self._waits = [wait for wait in self._waits if wait not in known]
        return sum(began.elapsed_time(ended) for began, ended in known) / 1000
