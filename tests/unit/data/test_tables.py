"""Which columns of a CSV file are inputs: decided by all rows, and nothing vanishes."""

from __future__ import annotations

import csv
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dptrain.data import open_data
from dptrain.data.inputs import open_inputs
from dptrain.data.sources.csv_file import read_numeric_columns
from dptrain.errors import UserError
from dptrain.network import Dense, MeanSquaredError, Network, SigmoidBinaryCrossEntropy
from tests.tiers import tiered

WORDS = ("", "NA", "True", "5%", "1,234", "0,5", "0x1F", "nan", "inf", "1_0", "12:00", 'a "b"')


def line(width: int) -> Network:
    return Network((width,), [Dense(1)], MeanSquaredError(), "line")


class Table:
    """A random table, and what must be read from it."""

    def __init__(self, path: Path, seed: int) -> None:
        rng = np.random.default_rng(seed)
        rows = int(rng.integers(8, 30))
        self.path, self.numbers = path, dict[str, np.ndarray]()
        self.left_out, self.mixed, self.nameless = dict[str, str](), dict[str, tuple[int, str]](), 0
        cells: list[tuple[str, list[str]]] = []
        for index in range(rng.integers(2, 7)):
            name, kind = f"c {index}", rng.integers(6)
            numbers = rng.normal(0, 10.0 ** rng.integers(-3, 5), rows)
            texts = [f" {v!r} " if rng.integers(9) == 0 else repr(v) for v in numbers.tolist()]
            if kind == 0:
                texts = [str(rng.choice(WORDS)) for _ in texts]
                self.left_out[name] = texts[0]
            elif kind == 1 and rng.integers(3) == 0:
                row = int(rng.integers(rows))
                texts[row] = str(rng.choice(WORDS))
                self.mixed[name] = row, texts[row]
            elif kind == 2:
                name = str(rng.choice(["", "Unnamed: 0"]))
                self.nameless += 1
            else:
                self.numbers[name] = numbers
            cells.append((name, texts))
        self.target = rng.normal(size=rows)
        texts = [repr(value) for value in self.target.tolist()]
        cells.insert(int(rng.integers(len(cells) + 1)), ("t", texts))
        self.lines = []
        with path.open("w", newline="", encoding=str(rng.choice(["utf-8", "utf-8-sig"]))) as file:
            writer = csv.writer(file, lineterminator=str(rng.choice(["\n", "\r\n"])))
            writer.writerow([name for name, _ in cells])
            number, self.blank = 1, 0
            for row in range(rows):
                while rng.integers(15) == 0:
                    file.write("\n")
                    number, self.blank = number + 1, self.blank + 1
                writer.writerow([texts[row] for _, texts in cells])
                number += 1
                self.lines.append(number)
            file.write("\n" * int(rng.integers(3)))


@pytest.mark.parametrize("block", tiered(range(4), (0,)))
def test_columns_of_random_tables_are_read_or_named(tmp_path: Path, block: int) -> None:
    read = refused = 0
    for seed in range(75 * block, 75 * block + 75):
        table = Table(tmp_path / "t.csv", seed)
        spec = f"csv:{table.path}?target=t"
        if table.mixed or not table.numbers:
            with pytest.raises(UserError) as error:
                open_data(spec, line(1))
            for name, (row, text) in list(table.mixed.items())[:4]:
                cell = f"line {table.lines[row]}, column {name} is '{text}'"
                assert cell in str(error.value)
            if not table.mixed:
                assert "no numeric column except t" in str(error.value)
                assert all(name in str(error.value) for name in table.left_out)
            refused += 1
            continue
        data: Any = open_data(spec, line(len(table.numbers)))
        assert data.preprocessing.columns == tuple(table.numbers)
        notes = "\n".join(data.notes)
        for name, text in table.left_out.items():
            assert f"{name} ('{text}' in line {table.lines[0]})" in notes
        assert ("columns without a name" in notes) == (table.nameless > 0)
        assert (f"{table.blank} blank lines" in notes) == (table.blank > 0)
        values = np.column_stack(list(table.numbers.values()))
        cut = len(values) - len(values) // 5
        expected = (values - values[:cut].mean(axis=0)) / values[:cut].std(axis=0)
        x = np.empty((len(values) - cut, values.shape[1]), np.float32)
        y = np.empty((len(x), 1), np.float32)
        data.test.read(np.arange(len(x)), x, y)
        np.testing.assert_allclose(x, expected[cut:], rtol=1e-4, atol=1e-5)
        found = data.preprocessing.to_values(y[:, 0])
        largest = np.abs(table.target).max()
        np.testing.assert_allclose(found, table.target[cut:], rtol=1e-6, atol=1e-6 * largest)
        inputs = open_inputs(table.path, data.preprocessing)
        x = np.empty((len(values), values.shape[1]), np.float32)
        inputs.samples.read(np.arange(len(x)), x, np.empty((len(x), 1), np.float32))
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-5)
        read += 1
    assert read >= 35
    assert refused >= 5


@pytest.mark.parametrize("cell", WORDS)
@pytest.mark.parametrize("row", [0, 7, 19])
def test_one_cell_that_is_no_number_is_an_error(tmp_path: Path, cell: str, row: int) -> None:
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "t"])
        writer.writerows([[cell if i == row else 1.5 * i, i * i, -i] for i in range(20)])
    with pytest.raises(UserError) as error:
        open_data(f"csv:{path}?target=t", line(2))
    assert f"line {row + 2}, column a is '{cell}'; expected a finite number" in str(error.value)
    assert "leave out these columns with columns=b" in str(error.value)
    assert open_data(f"csv:{path}?target=t&columns=b", line(1)).input_shape == (1,)


def write(path: Path, header: str, separator: str = ",") -> Path:
    columns = header.count(separator) + 1
    rows = (separator.join(f"{i * (k + 2) % 13}" for k in range(columns)) for i in range(20))
    path.write_text("\n".join([header, *rows, ""]))
    return path


@pytest.mark.parametrize(("mark", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_other_separators_are_named(tmp_path: Path, mark: str, name: str) -> None:
    path = write(tmp_path / "t.csv", f"a{mark}b{mark}t", mark)
    for read in (
        lambda: open_data(f"csv:{path}?target=t", line(2)),
        lambda: open_data(f"csv:{path}", line(2)),
        lambda: open_data(f"csv:{path}?target=t&columns=a", line(1)),
    ):
        with pytest.raises(UserError, match=f"2 {name} and 0 commas; expected .* by commas"):
            read()


def test_names_with_marks_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = "".join(f"{i % 3},{i % 5},{i * i},1\n" for i in range(20))
    path.write_text('"a,b",R&D,50%,u;v\n' + rows)
    data = open_data(f"csv:{path}?target=R%26D&columns=a%2Cb,50%,u;v", line(3))
    assert data.preprocessing.columns == ("a,b", "50%", "u;v")
    assert data.preprocessing.target == "R&D"


def test_names_in_another_form_are_the_same_columns(tmp_path: Path) -> None:
    names = [unicodedata.normalize(form, "größe") for form in ("NFC", "NFD")]
    for in_file, given in (names, names[::-1]):
        path = write(tmp_path / "t.csv", f"{in_file},b,t")
        data = open_data(f"csv:{path}?target=t&columns={given}", line(1))
        assert data.preprocessing.columns == (names[0],)
        other = write(tmp_path / "u.csv", f"b,{given},t")
        assert len(open_inputs(other, data.preprocessing).names) == 20


def test_a_column_that_numbers_the_rows_is_mentioned(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,b,t\n" + "".join(f"{i + 7},{i % 3},{i % 4}\n" for i in range(20)))
    data = open_data(f"csv:{path}?target=t", line(2))
    assert data.notes == ("the input column id numbers the rows; columns= leaves it out",)


def test_many_columns_are_named_up_to_a_number(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    header = ",".join(["t", "a", *(f"c{i}" for i in range(30))])
    path.write_text(
        header + "\n" + "".join(f"{i % 3},{i % 4}" + ",x" * 30 + "\n" for i in range(9))
    )
    (note,) = read_numeric_columns(path, "t").notes
    assert "c19 ('x' in line 2) and 10 more" in note


def test_labels_that_only_the_test_rows_have_are_named(tmp_path: Path) -> None:
    path = tmp_path / "sorted.csv"
    three = Network((1,), [Dense(3)], name="three")
    for labels, unseen in ((np.repeat([0, 1, 2], [10, 15, 5]), "2"), (np.arange(30) % 3, "")):
        rows = "".join(f"{row},{label}\n" for row, label in enumerate(labels))
        path.write_text(f"a,t\n{rows}", encoding="utf-8")
        data = open_data(f"csv:{path}?target=t", three)
        found = [note for note in data.notes if "no training sample has" in note]
        assert len(found) == bool(unseen)
        assert all(f"sample has: {unseen}; shuffle" in note for note in found)


def test_two_labels_for_one_sigmoid_output_must_be_named(tmp_path: Path) -> None:
    path = tmp_path / "signs.csv"
    rows = "".join(f"{row},{2 * (row % 2) - 1}\n" for row in range(30))
    path.write_text(f"a,t\n{rows}", encoding="utf-8")
    one = Network((1,), [Dense(1)], SigmoidBinaryCrossEntropy(), "one")
    with pytest.raises(UserError, match=r"name the labels, such as csv:.*classes=-1:no,1:yes$"):
        open_data(f"csv:{path}?target=t", one)
    data = open_data(f"csv:{path}?target=t&classes=-1:no,1:yes", one)
    assert data.classes == ("no", "yes")
