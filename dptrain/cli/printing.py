"""Print results as tables or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dptrain.files import dump_json
from dptrain.measure.console import make_console
from dptrain.tables import Column, Records, Table
from dptrain.texts import with_escapes

if TYPE_CHECKING:
    from dptrain.doctor.finding import Finding
    from dptrain.measure.layers import TimedLayers
    from dptrain.measure.profile.losses import Losses
    from dptrain.measure.profile.profile import Profile
    from dptrain.network.network import Network
    from dptrain.plan.plan import Plan
    from dptrain.scaling.study import Study
    from dptrain.training.evaluation.quality import Quality
    from dptrain.training.rate_range import RangeTest


def print_values(values: Mapping[str, Any], *, as_json: bool) -> None:
    """Print one name and value per line."""
    if as_json:
        return _print_json(values)
    width = max(map(len, values), default=0)
    for name, value in values.items():
        click.echo(
            f"{name:{width}}  {value:.6g}"
            if isinstance(value, float)
            else f"{name:{width}}  {with_escapes(str(value))}"
        )
    return None


def print_evaluation(result: Mapping[str, Any], quality: Quality, *, as_json: bool) -> None:
    """Print what `dptrain.training.evaluation.evaluation.evaluate_model` returns."""
    from dptrain.training.evaluation.quality_tables import quality_tables
    from dptrain.training.evaluation.regression import r2_remark

    if as_json:
        return _print_json(result)
    parts = ("classes", "confusion", "labels", "notes")
    print_values({k: v for k, v in result.items() if k not in parts}, as_json=False)
    if remark := r2_remark(result.get("r2")):
        click.echo(f"R²{remark}")
    if tables := quality_tables(quality):
        click.echo()
        print_tables(tables)
    return None


def print_range_test(result: RangeTest, output: Path | None, *, as_json: bool) -> None:
    """Print the result of a learning-rate range test."""
    if as_json:
        return _print_json(result.facts())
    click.echo(
        f"{result.network} on {result.data}, {result.optimizer}, minibatch {result.batch_size}: "
        f"{len(result.rates)} steps, learning rates {result.rates[0]:.2g} to {result.rates[-1]:.2g}"
    )
    if result.steepest is not None:
        click.echo(f"the loss falls fastest at {result.steepest:.2g}")
        click.echo(f"the loss is lowest at     {result.lowest:.2g}")
    click.echo(result.advice)
    if result.diverged is not None:
        click.echo(f"training diverges at      {result.diverged:.2g}")
    if output is not None:
        click.echo(f"plot: {output / 'rates.svg'}")
    return None


def print_networks(
    rows: Sequence[Mapping[str, Any]], presets: Sequence[Mapping[str, Any]], *, as_json: bool
) -> None:
    """Print what `dptrain.describe.list_networks` and `list_presets` return."""
    if as_json:
        return _print_json({"networks": rows, "presets": presets})
    heads = ("network", "description", "parameters", "data")
    cells = [
        (row["network"], row["description"], f"{row['parameters']:,}", row["data"] or "")
        for row in rows
    ]
    print_tables([Table.of_rows("Networks", heads, cells, text=(*heads[:2], heads[3]))])
    console = make_console()
    console.print(
        "NETWORK can also be mlp-A-B-C, which predicts values, classifier-A-B-C, which predicts "
        "classes, or multilabel-A-B-C, with A, B and C units per layer, or a .toml file. `dptrain "
        "train --network NETWORK --dry-run` shows the recipe."
    )
    names = ("preset", "description")
    lines = [(preset["preset"], preset["description"]) for preset in presets]
    print_tables([Table.of_rows("Presets", names, lines, text=names)])
    console.print(
        "`dptrain train --config PRESET` trains with a preset; flags replace its settings."
    )
    return None


def print_description(description: Mapping[str, Any], *, as_json: bool) -> None:
    """Print what `dptrain.describe.describe_plan` returns."""
    if as_json:
        return _print_json(description)
    heading = f"{_heading(description)}\n"
    tables = (_layer_table(description), _stage_table(description), _memory_table(description))
    print_tables([heading, *tables])
    click.echo(
        "`dptrain layers` times each layer alone, and `dptrain profile` each layer of training."
    )
    return None


def print_data(found: Mapping[str, Any]) -> None:
    """Print what `dptrain.data.inspection.describe_data` returns."""
    stored = "different sizes" if found["stored_shape"] is None else _shape(found["stored_shape"])
    values = {
        "data": found["description"],
        "stored": f"{stored}, {found['stored_type']}",
        "network's input": _shape(found["input_shape"]),
        "preprocessing": found["preprocessing"],
        "digest": found["digest"],
    }
    print_values(values, as_json=False)
    heads = ("split", "samples", "inputs", "mean", "deviation", "targets")
    rows = [
        (
            split["name"],
            f"{split['samples']:,}",
            f"{split['inputs']['low']:.4g} to {split['inputs']['high']:.4g}",
            f"{split['inputs']['mean']:.4g}",
            f"{split['inputs']['deviation']:.4g}",
            _targets(split),
        )
        for split in found["splits"]
    ]
    table = Table.of_rows("Splits", heads, rows, text=("split", "inputs", "targets"))
    print_tables([table, *_class_table(found["splits"])])


def _targets(split: Mapping[str, Any]) -> str:
    if split["targets"] is not None:
        low, high = split["targets"]
        return f"{low:.4g} to {high:.4g}"
    return f"{len(split['classes'])} classes"


def _class_table(splits: Sequence[Mapping[str, Any]]) -> Iterable[Table]:
    """Yield a table of the classes, if there are any, with the share of each split."""
    names = list(dict.fromkeys(name for split in splits for name in split["classes"]))
    if not names:
        return
    shares = [
        [split["classes"].get(name, 0) / max(split["read"], 1) for split in splits]
        for name in names
    ]
    rows = [
        (name, *(f"{share:.1%}" for share in found))
        for name, found in zip(names, shares, strict=True)
    ]
    heads = ("class", *(split["name"] for split in splits))
    yield Table.of_rows("Classes", heads, rows, text=("class",))


def print_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print what `dptrain.doctor.examine` returns."""
    if as_json:
        return _print_json([asdict(finding) for finding in findings])
    from rich.text import Text

    console = make_console()
    width = max(len(finding.subject) for finding in findings)
    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    for finding in findings:
        line = Text(f"{finding.status:7}  ", style=styles[finding.status])
        line.append(f"{finding.subject:{width}}  {finding.text}", style="default")
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(f"{'':{width + 11}}→ {finding.advice}", soft_wrap=True)
    return None


def print_layers(
    timed: TimedLayers,
    network: Network,
    task: str,
    *,
    as_json: bool,
    batch_size: int,
    precision: str | None,
    threads: int,
) -> None:
    """Print what `dptrain.measure.layers.time_layers` returns."""
    if as_json:
        return _print_json(timed.values())
    from dptrain.measure.layers import layers_table

    arithmetic = f", {precision}" if precision else ""
    title = f"Layers of {network.name}, each alone: {task}, batch {batch_size}{arithmetic}"
    print_tables([layers_table(timed, title)])
    return None


def print_explanations(plans: Sequence[Plan], *, as_json: bool) -> None:
    """Print the algorithm of each stage of plans of one network for several backends."""
    from dptrain.measure.profile.explanations import explain_stages, explanation_table

    explained = [(plan, explain_stages(plan)) for plan in plans]
    if as_json:
        return _print_json([asdict(row) for _, rows in explained for row in rows])
    print_tables([explanation_table(plan, rows) for plan, rows in explained])
    return None


def print_profile(profile: Profile, output: Path | None, *, as_json: bool) -> None:
    """Print what `training.profiling.profiling.profile` returns, and the folder of its files."""
    if as_json:
        return click.echo(profile.text())
    from dptrain.measure.profile.profile_lines import profile_report

    written = [] if output is None else [f"written: {output}"]
    print_tables([*profile_report(profile), *written])
    return None


def print_losses(losses: Losses, output: Path | None, *, as_json: bool) -> None:
    """Print what `training.profiling.losses.measure_losses` returns, and the folder of its file."""
    if as_json:
        return click.echo(losses.text())
    from dptrain.measure.profile.loss_tables import losses_report

    written = [] if output is None else [f"written: {output}"]
    print_tables([*losses_report(losses), *written])
    return None


def print_study(study: Study, folder: Path, *, as_json: bool) -> None:
    """Print what `dptrain.scaling.scale.conclude_study` returns, and the folder of its files."""
    if as_json:
        return click.echo(study.text())
    from dptrain.scaling.tables import study_report

    print_tables([*study_report(study), f"written: {folder}"])
    return None


def print_tables(parts: Iterable[Any]) -> None:
    """Print tables and text."""
    console = make_console()
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def _print_json(value: Any) -> None:
    click.echo(dump_json(value, indent=2, ensure_ascii=False))


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _heading(description: Mapping[str, Any]) -> str:
    count = description["threads"]
    threads = f"{count} thread{'s' if count > 1 else ''}"
    use = f"trained by {description['optimizer']}" if description["training"] else "inference"
    passes = f" in each of {description['passes']} passes" if description["passes"] > 1 else ""
    count, trained = description["parameters"], description["trained_parameters"]
    frozen = f", {trained:,} of them trained" if description["training"] and trained < count else ""
    return (
        f"{description['network']}: {_shape(description['input_shape'])} → "
        f"{_shape(description['output_shape'])}, {description['loss']}, "
        f"{count:,} parameters{frozen}\n"
        f"on one rank: batch {description['batch_size']}{passes}, "
        f"backend {description['backend']}, {description['precision']}, {threads}, {use}"
    )


def _layer_table(description: Mapping[str, Any]) -> Table:
    rows = [{**row, "output": _shape(row["output_shape"])} for row in description["layers"]]
    found = _with_total(rows, "name", ("parameters", "forward_flops", "backward_flops"))
    names = found.texts("name", "layer"), found.texts("output", "output")
    columns = (*names, found.plain("parameters", "parameters"), *_flops(found, description))
    return Table("Layers, for one sample", columns, rules=frozenset({len(rows)}))


def _stage_table(description: Mapping[str, Any]) -> Table:
    from dptrain.describe import group_stages
    from dptrain.measure.profile.tables import LOW_MARK

    title = f"Groups of layers that {description['backend']} computes together, for a full batch"
    rows = [
        {**_without_zeros(row), "group": f"{row['group']}{LOW_MARK * row['is_low']}"}
        for row in group_stages(description["stages"])
    ]
    found, is_low = Records.of(rows), any(row.get("is_low") for row in rows)
    moved = found.values("bytes_moved", "moved", "MB", decimals=3, missing="")
    note = (
        "! marks groups with a stage that is estimated to reach less than a third of the roofline."
    )
    columns = (found.texts("group", "group"), *_flops(found, description), moved)
    return Table(title, columns, note if is_low else "")


def _memory_table(description: Mapping[str, Any]) -> Table:
    sizes = description["memory_bytes"]
    rows = [{"for": name, "bytes": size} for name, size in sizes.items() if name != "total"]
    found = _with_total(rows, "for", ("bytes",))
    columns = found.texts("for", "for"), found.values("bytes", "", "MB", decimals=3, missing="")
    return Table("Memory", columns, rules=frozenset({len(rows)}))


def _flops(found: Records, description: Mapping[str, Any]) -> list[Column]:
    directions = ("forward", "backward")[: 1 + description["training"]]
    return [
        found.values(f"{name}_flops", name, "MFLOP", decimals=3, missing="") for name in directions
    ]


def _with_total(rows: Sequence[Mapping[str, Any]], key: str, summed: Sequence[str]) -> Records:
    """Return rows and a last one with their sums; the cell of a zero is empty."""
    total = {name: sum(row[name] for row in rows) for name in summed}
    return Records.of(
        [_without_zeros(row) for row in (*rows, {key: "total", "output": "", **total})]
    )


def _without_zeros(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if value == 0 else value for name, value in row.items()}
