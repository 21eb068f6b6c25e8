"""What the log says of a start."""

from cachesvc.server.startup import Startup


def test_its_log_names_each_phase_and_work_once(caplog):
    startup = Startup()
    with caplog.at_level("INFO"), startup.during("loading"):
        for part in (0.0, 0.1, 0.2):
            startup.progress("reading the file", part)
        startup.progress("writing", 0.5)
        startup.progress("ready", 1.0)
    assert ["loading", "reading the file", "writing: 50%"] == caplog.messages
    assert ["loading"] == list(startup.took_s)
