"""The command of a machine that is not the head's: it starts the processes that the head wants, and
hands on what the head and they say to one another. They do not outlive it, nor it the head."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from weft.comm.address import RankAddress
from weft.comm.proven import QUIET_S, prove, say
from weft.config.errors import STOPPED, ConfigError, ConfigErrors, RunError
from weft.elastic.failure import Failure
from weft.elastic.nodes.link import Link, Words
from weft.elastic.nodes.meeting import Where
from weft.elastic.nodes.remote import Hello, to_words
from weft.elastic.process import LocalProcess
from weft.elastic.rank_process import Begin
from weft.elastic.signals import Asked

LOOK_S = 0.2
REFUSED = 2
"""Code of a goodbye to a command that has to be given other words."""
TRY_S = 0.1
"""From one look for the head to the next."""


def connected(
    folder: Path, address: RankAddress, hello: Hello, *, quiet_s: float, timeout_s: float
) -> Link:
    """Find the head of the job whose run folder this is.

    Raises:
        ConfigError: it is not there in time.
    """
    deadline, problem = time.monotonic() + timeout_s, "no command works there"
    host, _ = address.master
    while time.monotonic() < deadline:
        where = Where.read(folder)
        try:
            end = None if where is None else _proven(host, where)
            if end is not None:
                say(end, asdict(hello))
                return Link(end, quiet_s)
        except OSError as error:
            problem = f"{host}:{where.port if where else 0} does not answer: {error}"
        time.sleep(TRY_S)
    expected = f"a run folder in which the command of node 0 works within {timeout_s:g} s"
    hint = f"{problem[0].upper()}{problem[1:]}. Start the same command on every machine."
    raise ConfigError("--out", str(folder), expected, hint)


def _proven(host: str, where: Where) -> socket.socket | None:
    """A connection to the head, at the first address of its name where it listens; None where
    others listen there by now."""
    problem: OSError | None = None
    for *_, place in socket.getaddrinfo(host, where.port, type=socket.SOCK_STREAM):
        try:
            end = socket.create_connection((str(place[0]), where.port), QUIET_S)
        except OSError as error:
            problem = error
            continue
        try:
            prove(end, where.secret.encode(), is_server=False)
        except (ValueError, OSError):
            end.close()
        else:
            return end
    if problem is not None:
        raise problem
    return None


class Member:
    """The processes of this machine.

    Args:
        address: Of this command among those of the job.
        start: A new process.
        accept: The plan that the job begins with, and the ranks of it that are here; raises
            ConfigErrors.
        unpack: A target's arguments, from what the head packed.
        folder: Where ranks leave what only this machine reads.
    """

    def __init__(
        self,
        link: Link,
        address: RankAddress,
        *,
        start: Callable[[], LocalProcess],
        accept: Callable[[str, Sequence[int]], None],
        unpack: Callable[[Mapping[str, Any]], tuple[Any, ...]],
        folder: Path,
    ) -> None:
        self._link, self._address = link, address
        self._start, self._accept, self._unpack = start, accept, unpack
        self._folder = folder
        self._processes: dict[int, LocalProcess] = {}
        self._code: int | None = None
        """What the head ends with, once it has said so."""
        self._is_asked = False
        """To stop: so is whatever starts from then on."""

    def run(self, asked: Asked) -> int:
        """Until the head ends the job; the exit code of this command.

        Raises:
            ConfigErrors: the plan cannot be run here.
            RunError: the head is gone, or nothing can be started here any more.
        """
        try:
            while self._code is None:
                self._look()
                is_idle = not (self._is_asked or self._processes)
                if asked.times > 1 or (asked.times and is_idle):
                    return STOPPED
                if asked.times and not self._is_asked:
                    self._is_asked = True
                    self._terminate()
        finally:
            for each in self._processes.values():
                each.end()
            self._link.drop("its command has ended")
        return self._code

    def _terminate(self) -> None:
        for each in self._processes.values():
            each.terminate()

    def _look(self) -> None:
        sources = [source for each in self._processes.values() for source in each.sources]
        wait([self._link.fileno(), *sources], LOOK_S)
        for words in self._link.heard():
            self._obey(words)
        for number, process in list(self._processes.items()):
            self._hand_on(number, process)
        if self._link.lost and self._code is None:
            host, _ = self._address.master
            raise RunError(
                f"node 0 ({host}), which guides this job, is gone: {self._link.lost}; the ranks of "
                "this machine were ended. If it still runs, it gave this machine up, as after a "
                "pause of recovery.heartbeat_s: give this machine's command again. Else the same "
                "command on every machine goes on from the last checkpoint"
            )

    def _obey(self, words: Words) -> None:
        match words["do"]:
            case "bye" if words["text"] and words["code"] != REFUSED:
                raise RunError(words["text"])
            case "bye" if words["text"]:
                raise ConfigError("", None, "", words["text"])
            case "bye":
                self._code = words["code"]
            case "plan":
                self._consider(words)
            case "start":
                self._started(words["id"])
            case _ if words["id"] not in self._processes:
                pass  # it has ended, which the head is about to hear
            case "begin":
                self._begin(words)
            case "order":
                self._processes[words["id"]].tell(words["order"])
            case "terminate":
                self._processes[words["id"]].terminate()
            case "kill":
                self._processes[words["id"]].end()

    def _started(self, number: int) -> None:
        self._processes[number] = self._start()
        if self._is_asked:
            self._processes[number].terminate()

    def _consider(self, words: Words) -> None:
        try:
            self._accept(words["plan"], words["ranks"])
        except (ConfigError, ConfigErrors) as error:
            self._link.say(**{"is": "refused", "text": str(error)})
            raise
        self._link.say(**{"is": "ready"})

    def _begin(self, words: Words) -> None:
        number, epoch = words["id"], words["epoch"]
        host, _ = self._address.master
        address = RankAddress(
            **words["address"],
            master=(host, words["port"]),
            node=str(self._address.rank),
            phase_file=self._folder / f"phase-{epoch}-{number}",
        )
        begin = Begin(
            address,
            self._unpack(words["args"]),
            self._folder / f"failed-{epoch}-{number}.json",
            epoch=epoch,
            may_go_on=words["may_go_on"],
        )
        self._processes[number].tell(begin)

    def _hand_on(self, number: int, process: LocalProcess) -> None:
        code = process.exitcode  # before: its last words are not missed
        for word in process.words():
            self._say(number, process, **{"is": "word", "word": to_words(word)})
        if code is None:
            return
        if not process.can_be_replaced:
            raise RunError(f"a rank {process.loss}")
        self._say(number, process, **{"is": "ended", "code": code})
        process.end()
        del self._processes[number]

    def _say(self, number: int, process: LocalProcess, **words: Any) -> None:
        report: Failure | None = process.report()
        self._link.say(
            id=number,
            phase=process.phase(),
            report=None if report is None else asdict(report),
            **words,
        )
