"""The README says what the program does."""

from pathlib import Path

from fedmpi import presets

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_table_of_presets_is_the_one_of_the_program():
    section = README.split("## Presets")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    listed = {name.strip(" `"): (title.strip(), paper.strip()) for name, title, paper in rows}
    assert listed == {preset.name: (preset.title, preset.paper) for preset in presets()}
