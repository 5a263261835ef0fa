"""How a tune looks while it runs: what its events tell, as bars on a terminal and as lines elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from emmy.report import SPEAK_EVERY_S, Bar, Screen, counted, lasting, number, schedule_text

if TYPE_CHECKING:
    from emmy.search.courses import Course, Courses
    from emmy.search.events import Event, Measured, Planned, Scored, Started


@dataclass(slots=True)
class _Told:
    """What was said of a run under way. `name`: of its bar."""

    name: str
    spoke_s: float = 0.0


class TuneProgress:
    """Listens to tuning runs: on a terminal a bar for each that is under way, and one for all where there are several; elsewhere
    lines: each better schedule, and now and then.

    Runs on several cards may mingle, and those of several ops on one card; a line then says what it is about.
    """

    def __init__(self, screen: Screen) -> None:
        self._bar = Bar(screen)
        self._courses: dict[str, Courses] = {}  # by target
        self._told: dict[tuple[str, str], _Told] = {}  # by target and op

    def __enter__(self) -> TuneProgress:
        self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__()

    def say(self, text: str) -> None:
        self._bar.say(text)

    def __call__(self, event: Event) -> None:
        from emmy.search.courses import Courses
        from emmy.search.events import Finished, Measured, Note, Planned, Racing, Scored, Started

        if isinstance(event, Note):
            self.say(f"note: {event.text}")
            return
        courses = self._courses.setdefault(event.target, Courses())
        course = courses.hear(event)
        match event:
            case Planned():
                self._plan(event)
            case Started():
                self._start(event)
            case Measured() | Scored():
                if course is not None and course.is_new:
                    self._counted(courses, course, event)
            case Racing(op, n, target):
                self.say(f"{self._name(op, target)}: racing {n} finalists and the stock kernel, in turns")
            case Finished(op, why, trials, elapsed_s, target):
                if told := self._told.pop((target, op), None):
                    self._bar.drop(told.name)
                about = f"stopped ({why}); {counted(trials, 'trial')}, {elapsed_s:.1f} s in all"
                all_ = f"; {_far(courses)}" if courses.runs > 1 else ""
                self.say(f"{self._name(op, target)}: {about}{all_}")
        if self._bar.live and courses.runs > 1:
            at_once = f", {courses.abreast} at a time" if courses.abreast > 1 else ""
            self._bar(f"all on {event.target}", courses.ended, courses.runs, f"{_far(courses)}{at_once}")

    def _name(self, op: str, target: str) -> str:
        return f"{op} on {target}" if len(self._courses) > 1 else op

    def _plan(self, e: Planned) -> None:
        if e.runs > 1:
            at_once = f", {e.abreast} at a time" if e.abreast > 1 else ""
            before = f"; {e.ended} ended before the interruption" if e.ended else ""
            self.say(f"{e.runs} searches on {e.target}{at_once}{before}")

    def _start(self, e: Started) -> None:
        self._told[e.target, e.op] = _Told(self._name(e.op, e.target))
        about = [f"strategy {e.strategy}", f"budget {e.budget}"]
        about += [f"resumed after {e.resumed} trials"] if e.resumed else []
        about += [f"{e.known} schedules known"] if e.known else []
        about += [f"led by model {e.model}" if e.model else "no model"]
        self.say(f"{e.op} on {e.target}: {', '.join(about)}")

    def _counted(self, courses: Courses, c: Course, e: Measured | Scored) -> None:
        from emmy.search.events import Measured

        told = self._told[e.target, e.op]
        eta = "" if c.eta_s is None else f", {lasting(c.eta_s)} left"
        best_is = "best" if isinstance(e, Measured) else "best predicted"
        best = f"{best_is} {number(c.best_us)} us" if c.best_us else "nothing right yet"
        note = f"{counted(c.trials, 'trial')}, {c.per_s:.1f}/s{eta}, {best}"
        seconds, trials = c.budget.seconds, c.budget.trials
        done, of = (c.elapsed_s, seconds) if seconds else (float(c.trials), float(trials or c.trials + 1))
        if self._bar.live:
            self._bar(told.name, done, of, note)
        elif e.is_best or c.elapsed_s - told.spoke_s >= SPEAK_EVERY_S * len(courses.under_way):
            told.spoke_s = c.elapsed_s
            where = f"{self._name(c.op, e.target)}  " if courses.mingle or len(self._courses) > 1 else ""
            self.say(f"  {c.elapsed_s:6.1f} s  {where}{note}" + (f"  {schedule_text(e.schedule)}" if e.is_best else ""))


def _far(courses: Courses) -> str:
    """12 of 258 ended, 1 h 20 min left."""
    eta = courses.eta_s
    left = f", {lasting(eta)} left" if eta else ""
    return f"{courses.ended} of {courses.runs} ended{left}"
