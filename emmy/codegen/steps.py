"""Steps: what each role of a launch does, in order, with every wait and arrive explicit. Knows no device's code.

A plan says where things are; steps say when. They are derived (`emmy.codegen.lower`), can be executed on tiny shapes
(`emmy.codegen.execute`) and are expanded to a target's statements by its code generator. A step names values and loops
of the plan; pieces of axes are implied by the loops around it.
"""

from __future__ import annotations

from dataclasses import dataclass

from emmy.ir.plan import Launch, Loop, Plan, Role


@dataclass(frozen=True, slots=True)
class For:
    """Walk loop number `at` of the tile's nest: the piece of its axis that is left, `loop.step` at a time, last one short."""

    at: int
    loop: Loop
    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Open:
    """Accumulators of a reducing stage, for the block in scope, become the monoid's identity."""

    stage: str


@dataclass(frozen=True, slots=True)
class Compute:
    """The block in scope of a stage: folded into its open accumulators, or its value when it reduces nothing."""

    stage: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """The first operands of a stage's block go to registers, from its channels' fills (current + ahead), if there are such.

    A stage that is fetched ahead computes in two parts: Compute, after which its slots are no longer read, and Finish.
    """

    stage: str
    ahead: int


@dataclass(frozen=True, slots=True)
class Preload:
    """The first of a stage's operands that no launch writes go to registers, from memory; its next Compute begins with them."""

    stage: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The rest of the last Compute, on operands that are in registers."""

    stage: str


@dataclass(frozen=True, slots=True)
class Settle:
    """Wait until at most `pending` Computes of a stage are under way: what the others read is read, what they sum is summed.

    Only stages whose atom is asynchronous have it (PTX: wgmma.wait_group).
    """

    stage: str
    pending: int


@dataclass(frozen=True, slots=True)
class FoldParts:
    """Open accumulators take in every part that another launch left in the workspace, in order."""

    stage: str


@dataclass(frozen=True, slots=True)
class Share:
    """The accumulators of each agent that folded a share of a stage go to shared memory."""

    stage: str


@dataclass(frozen=True, slots=True)
class Gather:
    """The accumulators are those that all agents shared, combined in order; each agent takes the elements it finishes."""

    stage: str


@dataclass(frozen=True, slots=True)
class ClusterSync:
    """Every agent that computes, of every block of the cluster, meets every other. `every`: those that only fill, too."""

    every: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """Accumulators become the stage's value, kept in the tile."""

    stage: str


@dataclass(frozen=True, slots=True)
class StoreState:
    """Accumulators go, unfinished, to this block's part of the workspace. added: to the value in memory instead, by addition."""

    stage: str
    added: bool = False


@dataclass(frozen=True, slots=True)
class Store:
    """The value in the tile goes to memory: an output of the program, or read by another launch."""

    stage: str


# ---------------------------------------------------------------- tiles whose steps several blocks share
@dataclass(frozen=True, slots=True)
class Helping:
    """The body, in a block whose share of the tile does not begin it: it helps the block whose share does."""

    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Owning:
    """The body, in the block whose share begins the tile: it finishes the tile, whoever else has a share."""

    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class ForHelpers:
    """The body once for each block that helps with the tile, in the order of their shares."""

    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class LeaveSums:
    """Accumulators go, unfinished, to this block's place in memory; each agent's lie as only the same agent reads them."""

    stage: str


@dataclass(frozen=True, slots=True)
class RaiseFlag:
    """This block's flag says that its sums are there, to whoever sees it (PTX ISA: st.release)."""

    stage: str


@dataclass(frozen=True, slots=True)
class AwaitFlag:
    """Wait until the helper's flag is up: its sums can be read then (PTX ISA: ld.acquire). One agent waits for all."""

    stage: str


@dataclass(frozen=True, slots=True)
class LowerFlag:
    """The helper's flag is as before it was raised, for the next launch."""

    stage: str


@dataclass(frozen=True, slots=True)
class TakeSums:
    """Accumulators take in those that the helper left."""

    stage: str


# ---------------------------------------------------------------- parts that the last block to leave one combines
@dataclass(frozen=True, slots=True)
class CountPart:
    """One agent counts that this block's part of a stage is there, and learns how many were (PTX ISA: atom.acq_rel)."""

    stage: str


@dataclass(frozen=True, slots=True)
class EachTile:
    """The body once for each tile of the role, before the first is made. Agents may share the tiles out."""

    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class CountBegun:
    """One agent counts that this block will leave its part of a stage, and learns how many will (PTX ISA: atom.relaxed)."""

    stage: str


@dataclass(frozen=True, slots=True)
class TakeParts:
    """Open accumulators take in every part of a marked workspace, in order, waiting until it is there; it is gone then."""

    stage: str


@dataclass(frozen=True, slots=True)
class CountFirst:
    """One agent counts that this block will add its part; the body where it is the first. The last sets the count back."""

    stage: str
    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Clear:
    """One agent sets the tile's elements of a stage to zero, where parts are added to them."""

    stage: str


@dataclass(frozen=True, slots=True)
class RaiseCleared:
    """All may know that the tile's elements of a stage were set to zero (PTX ISA: st.release)."""

    stage: str


@dataclass(frozen=True, slots=True)
class AwaitCleared:
    """One agent waits until the tile's elements of a stage are zero, and what others have added (PTX ISA: ld.acquire)."""

    stage: str


@dataclass(frozen=True, slots=True)
class PassCleared:
    """One agent counts that this block knows; the last of those that must lowers the flag, for the next launch."""

    stage: str


@dataclass(frozen=True, slots=True)
class IfLast:
    """The body, in the block that was the last to count of those whose parts go together: all can be read, or waited for."""

    stage: str
    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class ResetCount:
    """The count is as before the first part, for the next launch."""

    stage: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Fill number (current + ahead) of a channel goes to its slot, if the loop has that many iterations."""

    value: str
    ahead: int


@dataclass(frozen=True, slots=True)
class Advance:
    """The current fill of these channels is done with: the next one is current."""

    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """The copies since the last commit form a group (PTX: cp.async.commit_group)."""


@dataclass(frozen=True, slots=True)
class WaitGroup:
    """Wait until at most `pending` committed groups are under way (PTX: cp.async.wait_group)."""

    pending: int


@dataclass(frozen=True, slots=True)
class BlockSync:
    """Every agent of the block meets every other."""


@dataclass(frozen=True, slots=True)
class RoleSync:
    """Every agent of the role meets every other; no other role takes part (PTX: bar.sync, of so many threads)."""


@dataclass(frozen=True, slots=True)
class BarWait:
    """Wait on the slot of a barrier that the channel's current fill (plus ahead) uses, for the phase of its lap."""

    barrier: str
    value: str
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class BarArrive:
    """Arrive `count` times at the slot of the channel's current fill (plus ahead; -1: the one before, if there was one)."""

    barrier: str
    value: str
    count: int
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class TurnWait:
    """Wait for the token that lets dealt role `index` enter its ring loop."""

    index: int


@dataclass(frozen=True, slots=True)
class TurnPass:
    """Hand the token to role `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class LetNext:
    """The launch behind this one may begin, if it is early, once every block has come this far or ended."""


@dataclass(frozen=True, slots=True)
class LaunchWait:
    """Wait until every launch before this one has ended and what they wrote can be read (PTX: griddepcontrol.wait)."""


@dataclass(frozen=True, slots=True)
class Together:
    """The body, inside loops over agents, when all of them have come this far: each does its part of it."""

    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Ahead:
    """The body, in the scope of fill (current + `fill`) of a value's ring, if its loop has that: work that begins before its turn."""

    value: str
    fill: int
    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class From:
    """The body, from that fill of the channel's loop on: those before it were made ahead of the loop."""

    value: str
    fill: int
    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class At:
    """The body, at that fill of the channel's loop, or at the last where it has fewer: once a loop."""

    value: str
    fill: int
    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """The tile's block of a value is asked for, to wait in the last-level cache (PTX: cp.async.bulk.prefetch.tensor). A hint."""

    value: str


@dataclass(frozen=True, slots=True)
class Late:
    """The body, in the channel's loop before the last `fills` that it has, or at its start, if it has fewer.

    turns: how often, one fill apart
    """

    value: str
    fills: int
    body: tuple[Step, ...]
    turns: int = 1


@dataclass(frozen=True, slots=True)
class Ask:
    """Each lane asks for its first vectors of a value, to registers; what is made of it takes them from there."""

    value: str


Step = (
    For
    | Open
    | Compute
    | Fetch
    | Preload
    | Finish
    | Settle
    | FoldParts
    | Share
    | Gather
    | ClusterSync
    | Close
    | StoreState
    | Store
    | Copy
    | Advance
    | Commit
    | WaitGroup
    | BlockSync
    | RoleSync
    | BarWait
    | BarArrive
    | TurnWait
    | TurnPass
    | LetNext
    | LaunchWait
    | From
    | At
    | Prefetch
    | Late
    | Ask
    | Together
    | Ahead
    | Helping
    | Owning
    | ForHelpers
    | LeaveSums
    | RaiseFlag
    | AwaitFlag
    | LowerFlag
    | TakeSums
    | CountPart
    | CountBegun
    | EachTile
    | TakeParts
    | CountFirst
    | Clear
    | RaiseCleared
    | AwaitCleared
    | PassCleared
    | IfLast
    | ResetCount
)


@dataclass(frozen=True, slots=True)
class Barrier:
    """An mbarrier for each slot: arrivals that complete a phase, bytes that must have landed, the phase its waiter asks first.

    values: of the channels whose slots it tells of
    blocks: of a cluster, which fill those slots together: an arrival that gives one back is made in each of them

    A producer starts at parity 1, so that its first lap passes at once (PTX ISA: mbarrier.test_wait.parity).
    """

    name: str
    slots: int
    count: int
    tx_bytes: int
    first_parity: tuple[int, ...]
    values: tuple[str, ...]
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class RoleSteps:
    """What a role does for each of its tiles: `steps`, and `after`, when it has made all of them. before: once, ahead of all."""

    role: Role
    steps: tuple[Step, ...]
    after: tuple[Step, ...] = ()
    before: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Outline:
    """One launch as steps. `steps` of a role are those of one tile; the tiles follow from the nest's block loops.

    first, last: what every role does before its first tile, after its last one
    """

    plan: Plan
    launch: Launch
    barriers: tuple[Barrier, ...]
    roles: tuple[RoleSteps, ...]
    first: tuple[Step, ...] = ()
    last: tuple[Step, ...] = ()

    def __str__(self) -> str:
        out = [f"steps {self.launch.name}"]
        for b in self.barriers:
            bytes_ = f" + {b.tx_bytes} bytes" if b.tx_bytes else ""
            parity = "/".join(str(p) for p in dict.fromkeys(b.first_parity))
            everywhere = f" of {b.blocks} blocks" if b.blocks > 1 else ""
            out.append(
                f"  barrier {b.name}[{b.slots}]  {b.count} arrivals{everywhere}{bytes_}, waiters start at parity {parity}"
            )
        out += ["  every role, first:", *_show(self.first, "    ")] if self.first else []
        for r in self.roles:
            deal = f"  (tiles {r.role.deal[0]} mod {r.role.deal[1]})" if r.role.deal else ""
            out += [f"  role {r.role.name}, before its tiles:", *_show(r.before, "    ")] if r.before else []
            out.append(f"  role {r.role.name}{deal}, each tile:")
            out += _show(r.steps, "    ")
            out += [f"  role {r.role.name}, each tile once more:", *_show(r.after, "    ")] if r.after else []
        out += ["  every role, last:", *_show(self.last, "    ")] if self.last else []
        return "\n".join(out)


def _further(ahead: int) -> str:
    return f" {'-' if ahead < 0 else '+'} {abs(ahead)}" if ahead else ""


def _show(steps: tuple[Step, ...], pad: str) -> list[str]:  # noqa: C901  one case a step
    out: list[str] = []
    for s in steps:
        match s:
            case For(_, loop, body):
                out.append(f"{pad}for {loop.axis} in pieces of {loop.step}:  # {loop.level}")
                out += _show(body, pad + "  ")
            case Open(x):
                out.append(f"{pad}open {x}")
            case Compute(x):
                out.append(f"{pad}compute {x}")
            case Fetch(x, ahead):
                out.append(f"{pad}fetch first operands of {x}" + (f" (fill + {ahead})" if ahead else ""))
            case Preload(x):
                out.append(f"{pad}load first constant operands of {x}")
            case Finish(x):
                out.append(f"{pad}finish computing {x}")
            case Settle(x, n):
                out.append(f"{pad}wait until {n} computations of {x} are pending")
            case FoldParts(x):
                out.append(f"{pad}fold parts into {x}")
            case Share(x):
                out.append(f"{pad}share accumulators of {x}")
            case Gather(x):
                out.append(f"{pad}gather {x} from all shares")
            case Close(x):
                out.append(f"{pad}close {x}")
            case StoreState(x, added):
                out.append(f"{pad}add state of {x} in memory" if added else f"{pad}store state of {x} in its part")
            case Store(x):
                out.append(f"{pad}store {x}")
            case Copy(x, ahead):
                out.append(f"{pad}copy {x}" + (f" (fill + {ahead})" if ahead else ""))
            case Advance(xs):
                out.append(f"{pad}advance {', '.join(xs)}")
            case Commit():
                out.append(f"{pad}commit group")
            case WaitGroup(n):
                out.append(f"{pad}wait until {n} groups are pending")
            case ClusterSync(every):
                out.append(f"{pad}cluster sync" + (" of every role" if every else ""))
            case BlockSync():
                out.append(f"{pad}block sync")
            case RoleSync():
                out.append(f"{pad}role sync")
            case BarWait(b, x, ahead):
                out.append(f"{pad}wait {b} for fill of {x}" + _further(ahead))
            case BarArrive(b, x, n, ahead):
                out.append(f"{pad}arrive {b} x{n} for fill of {x}" + _further(ahead))
            case TurnWait(i):
                out.append(f"{pad}wait turn {i}")
            case TurnPass(i):
                out.append(f"{pad}pass turn to {i}")
            case LetNext():
                out.append(f"{pad}let the next launch begin")
            case LaunchWait():
                out.append(f"{pad}wait for the launches before")
            case Ahead(x, n, body):
                out += [f"{pad}ahead, of fill{_further(n)} of {x}:", *_show(body, pad + "  ")]
            case Together(body):
                out += [f"{pad}all together:", *_show(body, pad + "  ")]
            case From(x, n, body):
                out.append(f"{pad}from fill {n} of {x} on:")
                out += _show(body, pad + "  ")
            case At(x, n, body):
                out.append(f"{pad}at fill {n} of {x}:")
                out += _show(body, pad + "  ")
            case Prefetch(x):
                out.append(f"{pad}prefetch {x}")
            case Late(x, n, body, turns):
                last = f"{n}..{n - turns + 1}" if turns > 1 else f"{n}"
                out += [f"{pad}before the last {last} fills of {x}:", *_show(body, pad + "  ")]
            case Ask(x):
                out.append(f"{pad}ask for first vectors of {x}")
            case Helping(body):
                out += [f"{pad}where another block began the tile:", *_show(body, pad + "  ")]
            case Owning(body):
                out += [f"{pad}where this block began the tile:", *_show(body, pad + "  ")]
            case ForHelpers(body):
                out += [f"{pad}for each block that helps:", *_show(body, pad + "  ")]
            case LeaveSums(x):
                out.append(f"{pad}leave sums of {x}")
            case RaiseFlag(x):
                out.append(f"{pad}raise flag of {x}")
            case AwaitFlag(x):
                out.append(f"{pad}wait for the helper's flag of {x}")
            case LowerFlag(x):
                out.append(f"{pad}lower the helper's flag of {x}")
            case TakeSums(x):
                out.append(f"{pad}take the helper's sums of {x}")
            case CountPart(x):
                out.append(f"{pad}count the part of {x}")
            case CountBegun(x):
                out.append(f"{pad}count the part of {x} that will be left")
            case EachTile(body):
                out += [f"{pad}for each tile:", *_show(body, pad + "  ")]
            case TakeParts(x):
                out.append(f"{pad}take parts into {x} as they come")
            case CountFirst(x, body):
                out += [f"{pad}count the part of {x} that will be added, and as the first:", *_show(body, pad + "  ")]
            case Clear(x):
                out.append(f"{pad}set {x} to zero")
            case RaiseCleared(x):
                out.append(f"{pad}raise the flag that {x} is zero")
            case AwaitCleared(x):
                out.append(f"{pad}wait until {x} was zero")
            case PassCleared(x):
                out.append(f"{pad}count that {x} was zero")
            case IfLast(x, body):
                out += [f"{pad}where it was the last of {x}:", *_show(body, pad + "  ")]
            case ResetCount(x):
                out.append(f"{pad}reset the count of {x}")
    return out
