"""Draw every panel of the Grafana dashboard from the answers of a real Prometheus, under load on the demo model.

PROMETHEUS=build/prometheus/usr/bin/prometheus python scripts/draw_dashboard.py [docs/img/dashboard.png]
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.prometheus.prometheus_server import filled  # noqa: E402
from tests.prometheus.test_prometheus_scrape import DASHBOARD, DASHBOARD_OPTIONS, scraped  # noqa: E402

SECONDS = 25
"""Seconds of load after the first requests."""
COLUMNS = 4


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "img" / "dashboard.png"
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    with scraped("engine", 1, *DASHBOARD_OPTIONS) as (model, prometheus):
        time.sleep(SECONDS)
        end = time.time()
        found = [
            [
                (target["legendFormat"], prometheus.range(filled(target["expr"], model), end - SECONDS, end))
                for target in panel["targets"]
            ]
            for panel in panels
        ]
    rows = -(-len(panels) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(4.6 * COLUMNS, 2.8 * rows), layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, panel, targets in zip(axes.flat, panels, found, strict=False):
        for legend, series in targets:
            for one in series:
                metric = one["metric"]
                label = re.sub(r"{{(\w+)}}", lambda name, metric=metric: metric.get(name[1], ""), legend)
                times, values = zip(*((at - end, float(value)) for at, value in one["values"]), strict=True)
                axis.plot(times, values, label=label)
        axis.set_title(f"{panel['title']} ({panel['fieldConfig']['defaults']['unit']})", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
        if len(axis.lines) < 12:
            axis.legend(fontsize=6, loc="best")
    figure.savefig(out, dpi=70)
    Image.open(out).convert("RGB").quantize(64).save(out, optimize=True)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
