"""Documents, topics and logs of a run's life: its head, its workers, its hosts.

``orchestration`` owns them.

    head ──▶ RUN_RECIPE, RUN_PATHS ──▶ workers, hosts
    supervisor ──▶ PROCESS, ORDERS ──▶ host ──▶ TAKEN_BY, ENDING ──▶ supervisor
                   END, LEAVE ──────▶ host, worker ──▶ ENDING

``worker`` is KIND-NUMBER, ``name`` names one process of a worker. A process that is started again
has another name, so that no document of its predecessor is about it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from pipeline.documents.flow import STATE
from pipeline.documents.kinds import Document, Log, Topic

if TYPE_CHECKING:
    from orchestration.history.totals import RecordedTotals
    from orchestration.recipe.schema import Recipe
    from orchestration.state.paths import RunPaths
    from stages.environments.interface import Declarations
    from stages.flow.declarations import Declared
    from stages.rollout.external_checks import Terms

# of BEAT: in place of a host's name; of TAKEN_BY: no host may take the order any more
HEAD = "head"
OVER = -1  # of BEAT: the host has seen that the run has ended

# ── what the run is ──

RUN_RECIPE: Document[Recipe] = Document.of_class("recipe", "orchestration.recipe.schema:Recipe")
"""The recipe, from which workers build their parts."""

DECLARED: Document[Declared] = Document.of_class("declared", "stages.flow.declarations:Declared")
"""What the recipe's own stages declare, so that workers need not import their modules."""

ENVIRONMENTS: Document[Declarations] = Document.of_class(
    "environments", "stages.environments.interface:Declarations", topic=STATE
)
"""What the environments of the recipe declare: their tools, and whether they can be replayed."""

SESSIONS: Document[dict[str, str]] = Document.of_json("sessions")
"""Where programs outside ask for trajectories: `url`, and the `key` with which they do."""

RUN_FLOW: Document[dict[str, Any]] = Document.of_json("flow")
"""The stages and columns of the run as a graph, for viewers."""

RUN_PATHS: Document[RunPaths] = Document.of_class("place", "orchestration.state.paths:RunPaths")
"""The folders of the run on the head's machine, and where its checkpoints are copied to."""

EXTERNAL_TERMS: Document[Terms] = Document.of_class(
    "external", "stages.rollout.external_checks:Terms"
)
"""What an external program must know of the run. There once the run's workers have begun."""

HEADS_INDEX = Document("heads-index", bool)
"""The index ends with the head of the run."""

REWINDS = Document("rewinds", int, topic=STATE)
"""How often the run went on from a checkpoint after what hosts had was lost."""

TOTALS: Document[RecordedTotals] = Document.of_class(
    "totals",
    "orchestration.history.totals:RecordedTotals",
)
"""The totals of the run's events, written each minute and at the end."""

JUDGED = Document("guard:judged", str)
"""The id of the last event that the guard has judged."""

# ── checkpoints ──

CHECKPOINT_ASKED = Document("checkpoint:asked", str)
"""The id of the latest request for a checkpoint."""

CHECKPOINT_WRITTEN = Document("checkpoint:written", str)
"""The id of the latest request for which a checkpoint was written."""

CHECKPOINT_REPORTED = Document("checkpoint:told", int)
"""The newest version with a `checkpoint` event. A resumed run goes on from no older one."""

# ── workers ──

SCALES = Topic("scale")
"""Another number of rollout workers is asked for."""

SCALE = Document("scale", int, topic=SCALES)
"""The number of rollout workers that the run is asked for.

removed: when the run is resumed
"""

LEAVES = Topic("leave")
"""A worker is asked to leave."""

LEAVE = Document("leave:{name}", bool, topic=LEAVES)
"""The process is asked to leave: it claims nothing more, parks its responses, and ends."""

PROCESS = Document("life:{worker}", str)
"""The name of the worker's present process, or of its last one."""

RANKS = Document("ranks:{kind}", str)
"""The name of rank 0's process in the present rank group of this kind."""

# ── hosts ──

HOSTS = Topic("hosts")
"""A document about a worker on a host has changed, or a host has ended."""


@dataclass(frozen=True)
class Order:
    """The order to start worker ``kind``-``number`` as the process ``name``, on ``host`` ("": on
    any with room)."""

    kind: str
    number: int
    name: str
    host: str


ORDERS = Log("orders", lambda order: Order(**order), asdict)
"""Orders to start workers on hosts."""

TAKEN_BY = Document("host:{name}", str)
"""The host that has taken the order to start the process; HEAD: none may take it any more."""

END = Document("end:{name}", bool, topic=HOSTS)
"""The host is to end the process."""


class EndKind(IntEnum):
    """The end of a worker's process, which decides what follows. The value is the exit code."""

    DONE = 0
    FAILED = 1  # the supervisor restarts the worker; signals and all other codes count as this
    FATAL = 3  # by an error that a restart would not mend
    NOT_STARTED = 4  # before it was ready or a step was trained, by an error that may pass
    REWIND = 5  # steps since the checkpoint cannot be replayed: the run goes on from there

    @classmethod
    def _missing_(cls, value: object) -> EndKind:
        return cls.FAILED


@dataclass(frozen=True)
class Ending:
    """The end of a worker's process, and its reason.

    >>> killed = Ending(-9)
    >>> killed.kind.name, str(killed)
    ('FAILED', 'ended by signal 9')
    """

    code: int | None = None
    """Exit code, or the signal, negative. None: it has not ended yet, or its launcher knows."""
    reason: str = ""
    """Why, in words. "": nobody has said."""
    lost: str = ""
    """What it died with: its host, or its fork server."""
    fault: tuple[str, ...] = ()
    """What failed: classes of the error and its causes, keys of their problems, the line that
    raised the first cause."""

    @property
    def kind(self) -> EndKind:
        return EndKind.FAILED if self.code is None else EndKind(self.code)

    def __str__(self) -> str:
        code = self.code or 0
        by = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return self.reason or self.lost or by


def _ending(text: str) -> Ending:
    fields = json.loads(text)
    return Ending(**fields | {"fault": tuple(fields["fault"])})


ENDING: Document[Ending] = Document(
    "ending:{name}",
    _ending,
    lambda ending: json.dumps(asdict(ending)),
    HOSTS,
)
"""How the process ended. It writes its last error; its host adds the exit code at its end."""

BEAT = Document("beat:{host}", int)
"""A number that the host, or the head, counts up as its sign of life; OVER at a host's end."""

IS_LOST = Document("lost:{host}", bool)
"""Whether the head took the host for lost: its workers are started elsewhere, and its warehouse is
out of the run."""

WAREHOUSE = Document("warehouse:{host}", str)
"""The name of the host's warehouse."""

# ── external programs ──

LOADED = Document("loaded:{owner}:{worker}", int)
"""The version that an external worker has loaded. Owners cannot name each other's workers."""

STEPPED = Document("stepped", float)
"""When an external trainer made its last step, in Unix seconds."""
