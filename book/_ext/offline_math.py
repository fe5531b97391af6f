"""How do formulas render without a network?

MathJax 3 is shipped with the book. Its files come from the package sphinx-mathjax-offline, which carries all
of MathJax (24 MB). Copied is only what a page that writes its formulas in TeX can load (2.6 MB): the combined
component, the fonts, the TeX extensions that load on demand and the context menu.
"""

import importlib.util
import shutil
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

PACKAGE = "sphinx-mathjax-offline"
PARTS = ("tex-chtml.js", "output/chtml/fonts", "input/tex/extensions", "ui")


def mathjax_files() -> Path:
    """Folder of the installed MathJax; ExtensionError where it is not installed or lacks one of PARTS."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ExtensionError(f"formulas need the package {PACKAGE}: install the extra 'book' of this project")
    root = Path(spec.submodule_search_locations[0]) / "static" / "mathjax"
    for part in PARTS:
        if not (root / part).exists():
            raise ExtensionError(f"{PACKAGE} has no {part} in {root}: version 0.0.2 has it")
    return root


def copy_mathjax(app: Sphinx, exception: Exception | None) -> None:
    """Put MathJax into the built book's _static/mathjax, where mathjax_path of _config.yml points."""
    if exception is not None or app.builder.format != "html":
        return
    source, target = mathjax_files(), Path(app.outdir) / "_static" / "mathjax"
    for part in PARTS:
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part, dirs_exist_ok=True)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / part, target / part)


def setup(app: Sphinx) -> dict:
    """Called by Sphinx. A missing package is told here, before the build, and not after it."""
    mathjax_files()
    app.connect("build-finished", copy_mathjax)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
