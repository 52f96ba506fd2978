"""What prescribe prints: what noise or an error leaves open is never called slow, and no line is too long."""

import pytest
from prescribe_fakes import STEPS, Table, factory, image, only, quick, two_threads  # noqa: F401

from utils.prescribe import prescribe


@pytest.mark.parametrize(
    ("noise", "needed", "said"),
    [
        (1.5, 90, "about 90 rounds would settle it, raise replicates and min_run_time of prescribe() 10.0-fold."),
        (1.5, 9000, "a quieter machine would help more than time."),
        (1.5, 0, "too few rounds, raise replicates and min_run_time of prescribe()."),
        (
            1e9,
            90,
            "even the ratio is unknown, raise replicates and min_run_time of prescribe() on a quiet machine.",
        ),
    ],
)
def test_what_noise_leaves_open_is_not_called_slow(monkeypatch, noise, needed, said):
    wide = ("linearize", "channels_last")
    Table(dict.fromkeys(wide, 1.3), wide=wide, noise=noise, needed=needed).install(monkeypatch)
    found = prescribe(factory, image, skip=only(*wide, "1 thread"))
    assert [found[name].verdict for name in (*wide, "1 thread")] == ["inconclusive", "inconclusive", "equivalent"]
    text = " ".join(str(found).partition("kept: nothing. ")[2].split())
    assert text == (
        f"No step was shown to be faster with the same answer. Inconclusive: linearize, channels_last; {said}"
    )
    row = " ".join(next(line for line in str(found).splitlines() if line.startswith("  linearize")).split())
    shown = "1.30x 1.30x [0.87, 1.95]" if noise < 2 else "- - unknown"
    assert row.startswith(f"linearize {shown} inconclusive ")


def test_only_where_every_step_was_decided_none_is_faster(monkeypatch):
    Table().install(monkeypatch)
    assert "No step is faster with the same answer" in str(prescribe(factory, image))
    assert str(prescribe(factory, image, skip=STEPS)).endswith("kept: nothing. No step was measured.")


@pytest.mark.parametrize(("noise", "said"), [(2.0, "2.00x [1.00, 4.00], inconclusive"), (9.0, "unknown, noise hides")])
def test_a_total_that_noise_hides_is_no_gain_in_the_last_line(monkeypatch, noise, said):
    class Hidden(Table):
        def row(self, name, label, found, margin):
            self.wide = ("linearize + channels_last",) if label == "plain" else ()
            return super().row(name, label, found, margin)

    Hidden({"linearize": 1.25, "channels_last": 1.6}, noise=noise).install(monkeypatch)
    found = prescribe(factory, image, skip=only("linearize", "channels_last"))
    assert found.kept == ("linearize", "channels_last")
    assert f"kept: linearize, channels_last. Together {said}" in str(found)
    assert (found.pays is None) == ("unknown" in said)


def test_the_table_has_80_columns_with_the_longest_words(monkeypatch):
    Table({"BF16": 2.0}, wide=("BF16",), noise=1.99).install(monkeypatch)
    lines = str(prescribe(factory, image, allow_lossy=True)).splitlines()
    assert any(line.endswith("inconclusive approximate") for line in (" ".join(line.split()) for line in lines))
    assert max(map(len, lines)) <= 80
