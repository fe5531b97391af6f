"""Is the book built strictly, and does what is built need no network?"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
BUILD = "from jupyter_book.cli.main import main; main()"  # jupyter_book has no __main__
FLAGS = ("--config", "_config.yml", "--toc", "book/_toc.yml", "-W", "-n", "--keep-going", "--all")

INDEX = r"""
# Sample

Inline $y = Mx$; see {cite}`bick2025understanding` and [the figure](executed/page.ipynb).

$$ M_{ts} = C_t^\top \Big(\prod_{k=s+1}^{t} A_k\Big) B_s, \qquad s \le t $$ (eq-m)

Equation {eq}`eq-m` is the matrix.

```{bibliography}
```
"""
BROKEN = {
    "missing_page.md": "[gone](missing_page.md)",
    "no-such-label": "{ref}`no-such-label`",
    "no-such-key": "{cite}`no-such-key`",
    "no-such-equation": "{eq}`no-such-equation`",
    "no-such-image.png": "![an image](no-such-image.png)",
}


def notebook() -> nbformat.NotebookNode:
    """An executed notebook with a LaTeX output and the widget state that a progress bar leaves behind."""
    data = {"text/latex": r"$\frac{1}{2}$", "text/plain": "1/2"}
    output = nbformat.v4.new_output("display_data", data=data)
    bar = {"model_module": "@jupyter-widgets/controls", "model_name": "FloatProgressModel", "state": {}}
    cells = [
        nbformat.v4.new_markdown_cell("# Page\n\nHere $x^2$."),
        nbformat.v4.new_code_cell("half", execution_count=1, outputs=[output]),
    ]
    state = {"state": {"bar": bar}, "version_major": 2, "version_minor": 0}
    widgets = {"application/vnd.jupyter.widget-state+json": state}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "widgets": widgets})


def build(root: Path, index: str) -> subprocess.CompletedProcess:
    """Build a two-page book in root with this project's settings, extension, styles and references."""
    shutil.copy(ROOT / "_config.yml", root)
    for part in ("_ext", "_static"):
        shutil.copytree(ROOT / "book" / part, root / "book" / part)
    shutil.copy(ROOT / "book" / "references.bib", root / "book")
    (root / "book" / "index.md").write_text(index, encoding="utf-8")
    (root / "book" / "executed").mkdir()
    nbformat.write(notebook(), root / "book" / "executed" / "page.ipynb")
    toc = "format: jb-book\nroot: book/index\nchapters:\n  - file: book/executed/page\n"
    (root / "book" / "_toc.yml").write_text(toc, encoding="utf-8")
    command = [sys.executable, "-c", BUILD, "build", ".", *FLAGS]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a built book without faults."""
    root = tmp_path_factory.mktemp("good")
    result = build(root, INDEX)
    assert result.returncode == 0, result.stdout + result.stderr
    return root / "_build" / "html"


def external_requests(html: Path) -> list[str]:
    """What pages and styles load from elsewhere, as "file: URL"; links that a reader may follow are fine."""
    tags = "script|img|iframe|source|audio|video|embed|object|link"
    loading = rf"<(?:{tags})\b[^>]*?(?:src|href|data)\s*=\s*[\"']?"
    found = []
    for path in sorted(html.rglob("*.html")):
        text = path.read_text(encoding="utf-8")
        urls = re.findall(loading + r"((?:https?:)?//[^\"'\s>]+)", text)
        for body in re.findall(r"<script\b[^>]*>(.*?)</script>", text, flags=re.DOTALL):
            urls += re.findall(r"https?://[^\"'\s]+", body)
        found += [f"{path.relative_to(html)}: {url}" for url in urls]
    for path in sorted(html.rglob("*.css")):
        text = path.read_text(encoding="utf-8")
        urls = re.findall(r"(?:url\(\s*|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", text)
        found += [f"{path.relative_to(html)}: {url}" for url in urls]
    return found


def test_broken_references_fail_the_build(tmp_path: Path) -> None:
    result = build(tmp_path, INDEX + "\n\n".join(BROKEN.values()))
    assert result.returncode != 0
    warnings = "\n".join(line for line in result.stderr.splitlines() if "WARNING" in line)
    assert [name for name in BROKEN if name not in warnings] == []


def test_nothing_is_loaded_from_elsewhere(html: Path) -> None:
    assert (html / "book" / "executed" / "page.html").exists()
    assert external_requests(html) == []


@pytest.mark.parametrize(
    "text",
    [
        '<script async src="https://example.org/a.js"></script>',
        '<link rel="stylesheet" href="//example.org/a.css">',
        '<script>const url = "https://example.org/a.js"</script>',
        "<img alt='x' src='http://example.org/a.png'>",
    ],
)
def test_a_request_elsewhere_would_be_seen(tmp_path: Path, text: str) -> None:
    (tmp_path / "page.html").write_text(f"<html>{text}<a href='https://example.org/'>a link</a></html>")
    assert len(external_requests(tmp_path)) == 1


def test_mathjax_is_shipped_and_small(html: Path) -> None:
    mathjax = html / "_static" / "mathjax"
    page = (html / "book" / "index.html").read_text(encoding="utf-8")
    assert 'src="../_static/mathjax/tex-chtml.js' in page
    assert (mathjax / "tex-chtml.js").exists() and any(mathjax.rglob("*.woff"))
    assert sum(path.stat().st_size for path in mathjax.rglob("*") if path.is_file()) < 4e6


@pytest.mark.browser
@pytest.mark.parametrize(("page", "formulas"), [("book/index.html", 2), ("book/executed/page.html", 2)])
def test_formulas_render_without_network(html: Path, tmp_path: Path, chromium: str, page: str, formulas: int) -> None:
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=8000", "--dump-dom"]
    result = subprocess.run([*command, (html / page).as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.count("<mjx-container") == formulas
    assert "<mjx-merror" not in result.stdout
