"""Makes the pictures of the pages: ``python docs/images/make_pages.py``. Trains the demo; needs Chromium."""

import sys
import tempfile
from pathlib import Path

import torch

from sternway import graph, schedule
from sternway.demo import GPT, DemoOptions, train, write_report

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))


def main() -> None:
    """Take pictures of the demo's report, of a plan, and of a GPT's graph."""
    from browser import Browser

    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        pages = Path(folder)
        options = DemoOptions()
        browser.size(1280, 1500)
        browser.open(write_report(pages, options, train(options)))
        browser.screenshot(HERE / "report.png")
        costs = schedule.Costs(F=18.5, I=18.1, W=9.3, comm=0.6)
        browser.size(1280, 760)
        browser.open(schedule.compare(costs, ranks=4, microbatches=8, memory_limit=4).to_html(pages / "plan.html"))
        browser.run("(v => v.choose(v.runs[0], v.runs[0].lanes[2][9]))(sternway.views.Report.active)")
        browser.settle()
        browser.screenshot(HERE / "plan.png")
        browser.size(1280, 860)
        browser.open(_graph().to_html(pages / "graph.html", title="A GPT of 24 blocks"))
        browser.run("(p => { p.toggle(p.items.find(i => i.group && i.group.isFold)); })(sternway.views.Graph.picture)")
        browser.settle()
        browser.screenshot(HERE / "graph.png")


def _graph() -> graph.Graph:
    torch.manual_seed(0)
    model = GPT(vocabulary=256, dim=128, heads=4, layers=24, length=64)
    with graph.record(model):
        loss = model(torch.randint(0, 256, (2, 64))).logsumexp(-1).mean()
    return graph.capture(loss, model)


if __name__ == "__main__":
    main()
