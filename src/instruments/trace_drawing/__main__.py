"""`python -m instruments.trace_drawing`: write the drawings."""

from instruments.trace_drawing import DRAWINGS, FOLDER

for name, drawing in DRAWINGS.items():
    (FOLDER / f"{name}.svg").write_text(drawing(), encoding="utf-8")
