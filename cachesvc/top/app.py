"""The screen of `cachesvc top`. Runs on Textual's event loop; a worker thread reads the server."""

from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.reactive import reactive
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from cachesvc.server.server_file import LiveError
from cachesvc.top import model
from cachesvc.top.source import LiveSource, Reading

HELP = """\
[b]cachesvc top[/b]

[b]p[/b], [b]space[/b]   hold the screen still, and go on
[b]q[/b]          leave

hit         share of the prompt's tokens that the cache served
hits/s      blocks that the tier served
in/s out/s  blocks that came into the tier, and that left it
idle p50    how long blocks lay unused before they left: shorter than the pauses
            of your users' conversations means that the tier is too small
bars        the last two minutes; the hit rate up to 100 %, the others to their highest

Any key closes this page."""


class HelpScreen(ModalScreen[None]):
    def compose(self) -> ComposeResult:
        yield Static(HELP, id="help")

    def on_key(self) -> None:
        self.dismiss()


SCROLLBAR = 2  # columns


class TopApp(App[None]):
    TITLE = "cachesvc top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #headline { height: 1; text-style: bold; background: $primary-darken-2; padding: 0 1; }
    #alarm { height: auto; background: $error; color: $text; padding: 0 1; display: none; }
    #summary { height: auto; max-height: 6; padding: 0 1; }
    #sparks { height: 4; padding: 0 1; color: $accent; }
    #tiers { height: auto; max-height: 6; }
    #tenants { height: 1fr; overflow-x: hidden; }
    HelpScreen { align: center middle; }
    #help { width: 78; max-width: 100%; height: auto; max-height: 100%; padding: 1 2;
            background: $panel; border: round $primary; overflow-y: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("p,space", "pause", "pause"),
        Binding("question_mark", "help", "help"),
    ]

    paused: reactive[bool] = reactive(False)

    def __init__(self, source: LiveSource, *, interval_s: float = 1.0) -> None:
        super().__init__()
        self._source = source
        self._interval_s = interval_s
        self._before: Reading | None = None
        self._reading: Reading | None = None
        self._trouble = ""
        self._asked = False  # a reading is in progress

    def compose(self) -> ComposeResult:
        yield Static("reading the server ...", id="headline", markup=False)
        yield Static(id="alarm", markup=False)
        with Vertical():
            yield Static(id="summary", markup=False)
            yield Static(id="sparks", markup=False)
            tiers: DataTable[Text] = DataTable(id="tiers", show_cursor=False)
            tiers.can_focus = False
            yield tiers
            yield DataTable(id="tenants", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#tenants").focus()
        self.set_interval(self._interval_s, self._read)
        self._read()

    # Reading.

    def _read(self) -> None:
        """Starts a reading, unless one is still in progress."""
        if not self.paused and not self._asked:
            self._asked = True
            self._ask()

    @work(thread=True)
    def _ask(self) -> None:
        try:
            reading = self._source.read()
        except LiveError as error:
            self.call_from_thread(self._lost, str(error))
            return
        self.call_from_thread(self._take, reading)

    def _take(self, reading: Reading) -> None:
        self._asked = False
        if self.paused:
            return
        self._before, self._reading, self._trouble = self._reading, reading, ""
        self._draw()

    def _lost(self, why: str) -> None:
        self._asked = False
        self._trouble = f"{why}; trying again"
        self._draw()

    # Drawing.

    def _draw(self) -> None:
        reading = self._reading
        alarms = [self._trouble] if self._trouble else []
        if reading is not None:
            mark = "  [paused]" if self.paused else ""
            self.query_one("#headline", Static).update(model.headline(reading) + mark)
            self.query_one("#summary", Static).update(
                "\n".join(model.summary(reading, self.size.width - 2))
            )
            sparks = model.spark_lines(reading, self.size.width - 2)
            self.query_one("#sparks", Static).update("\n".join(sparks))
            alarms += model.alarms(reading)
            self._fill("#tiers", model.TIER_COLUMNS, model.tier_rows(reading, self._before))
            tenants = model.tenant_rows(reading, self._before)
            self._fill("#tenants", model.TENANT_COLUMNS, tenants)
        alarm = self.query_one("#alarm", Static)
        alarm.display = bool(alarms)
        alarm.update("\n".join(alarms))

    def _fill(self, place: str, columns: tuple[model.Column, ...], rows: list[list[str]]) -> None:
        """Shows the columns that fit the window, and keeps the cursor's position."""
        labels = [_cell(each.name, each) for each in columns]
        names = [column.name for column in columns]
        widths = [max(map(len, cells)) for cells in zip(map(str, labels), *rows, strict=True)]
        kept = model.fitting(names, widths, self.size.width - SCROLLBAR)
        table = self.query_one(place, DataTable)
        row = table.cursor_row
        table.clear(columns=True)
        table.add_columns(*(labels[number] for number in kept))
        for cells in rows:
            table.add_row(*(_cell(cells[number], columns[number]) for number in kept))
        table.move_cursor(row=min(row, max(0, len(rows) - 1)))

    def on_resize(self) -> None:
        self._draw()

    # Keys.

    def action_pause(self) -> None:
        self.paused = not self.paused
        self._draw()

    def action_help(self) -> None:
        self.push_screen(HelpScreen())


def _cell(text: str, column: model.Column) -> Text:
    return Text(text, justify="right" if column.right else "left")
