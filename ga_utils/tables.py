"""How are tables shown on a page? With the book's own style, numbers rounded, no row numbers."""

from __future__ import annotations

import pandas as pd
from pandas.io.formats.style import Styler


def show(table: pd.DataFrame, digits: int = 2) -> Styler:
    """The table as a page shows it: `digits` decimals, yes and no for booleans, the index only if it has a name."""
    table = table.copy()
    for name in table.columns:
        if table[name].dtype == bool:
            table[name] = table[name].map({True: "yes", False: "no"})
    styler = table.style.format(precision=digits).set_table_attributes('class="dataframe"')
    return styler if table.index.name else styler.hide(axis="index")
