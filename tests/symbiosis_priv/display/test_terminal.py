"""Output for people is never cut off."""

from hypothesis import given, strategies as st
from rich.console import Console

from symbiosis_priv.display import terminal

WORDS = st.text("abcdefgh:.0123456789", min_size=1, max_size=30)


@given(data=st.data(), width=st.integers(40, 200), things=st.integers(1, 6), columns=st.integers(2, 9))
def test_no_cell_is_cut_off(data: st.DataObject, width: int, things: int, columns: int) -> None:
    """Text is folded if necessary, provided that every column has room for a character and its border."""
    rows = data.draw(st.lists(st.lists(WORDS, min_size=columns, max_size=columns), min_size=things, max_size=things))
    headings = [f"h{place}" for place in range(columns)]
    console = Console(width=width, emoji=False)
    with console.capture() as shown:
        console.print(terminal.table(headings, rows))
    assert "…" not in shown.get()
    letters = sorted(shown.get().translate(str.maketrans("", "", "┏━┳┓┃┡╇┩│└─┴┘ \n")))
    assert letters == sorted("".join(headings) + "".join(map("".join, rows)))


def test_a_table_of_few_items_has_a_column_per_item() -> None:
    wide = terminal.table(["provider", "role", "address"], [["alpha", "executor", "127.0.0.1:7401"]])
    assert [column.header for column in wide.columns] == ["provider", "alpha"]
    long = terminal.table(["provider", "role"], [["alpha", "executor"], ["beta", "helper"]])
    assert [column.header for column in long.columns] == ["provider", "role"]
