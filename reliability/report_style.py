"""The report's colours and layout, as CSS. Data only.

One hue a name of the ledger, the same in every picture and table; light and dark follow the reader's own setting.
Red is kept for what was lost, green for what counts.
"""

from __future__ import annotations

from typing import Final

from outlast.reliability.goodput import STATES

_LIGHT: Final = {
    "train": "#2f9e6e",
    "lost_work": "#d64550",
    "detect": "#f08c2e",
    "stop": "#a9795a",
    "gate": "#6c7f93",
    "start": "#3f7fd1",
    "load": "#8468cf",
    "first_step": "#2ba3b3",
    "save": "#cdb02f",
    "wait": "#b9c1ca",
    "other": "#e4a3c4",
}
_DARK: Final = {**_LIGHT, "gate": "#8295a8", "wait": "#59636e", "start": "#5391e0", "load": "#9a82dd"}


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{state}:{colour};" for state, colour in colours.items())


STYLE: Final = (
    f":root{{--paper:#fbfbfa;--card:#ffffff;--ink:#1c2126;--quiet:#66707a;--line:#e1e4e8;--good:#1d7a52;--bad:#b8323d;"
    f"--on:#ffffff;{_variables(_LIGHT)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{--paper:#14171a;--card:#1c2024;--ink:#e6e9ec;--quiet:#95a0aa;"
    f"--line:#2f353b;--good:#4fc08d;--bad:#ee7a83;--on:#101214;{_variables(_DARK)}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1060px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:30px;line-height:1.2;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:17px;margin:0 0 14px}
header{margin-bottom:28px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:20px 22px;margin-bottom:20px}
.pill{font-size:14px;font-weight:600;vertical-align:middle;border-radius:99px;padding:3px 12px;
  border:1px solid currentColor;letter-spacing:0}
.good{color:var(--good)}.bad{color:var(--bad)}.plain{color:var(--quiet)}
.good-text{color:var(--good);font-weight:600}.bad-text{color:var(--bad);font-weight:600}
.quiet,small{color:var(--quiet)}
small{font-size:.86em}
.numbers{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:1px;background:var(--line);
  border:1px solid var(--line);border-radius:10px;overflow:hidden;margin:16px 0}
.numbers div{background:var(--card);padding:10px 14px}
.numbers dt{color:var(--quiet);font-size:13px}
.numbers dd{margin:0;font-size:21px;font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--ink);font-size:12.5px}
.tick{fill:var(--quiet)!important;font-size:11.5px!important}.middle{text-anchor:middle}.end,.lane{text-anchor:end}
.grid{stroke:var(--line)}
.mark{stroke:var(--bad);stroke-dasharray:2 3}.mark-dot{fill:var(--bad)}
.mark-number{fill:var(--on)!important;text-anchor:middle;font-weight:700;font-size:11px!important}
.loss{fill:none;stroke:var(--start);stroke-width:1.8;stroke-linejoin:round}.loss-dot{fill:var(--start)}
.loss-again{fill:none;stroke:var(--lost_work);stroke-width:7;stroke-linecap:round;opacity:.4}.loss-again-dot{fill:var(--lost_work)}
.restart{stroke:var(--quiet);stroke-dasharray:4 4}
.on-bar{fill:#fff!important;font-weight:600}
.legend{margin:10px 0 0;display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px}
i[class]{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}
table{border-collapse:collapse;margin-top:14px;font-variant-numeric:tabular-nums;font-size:14px}
td,th{padding:4px 18px 4px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{color:var(--quiet);font-weight:500}
.n{text-align:right}.sum td{font-weight:600;border-bottom:0}
.wide{width:100%;margin-top:0}.wide td:last-child{overflow-wrap:anywhere}
details{border-top:1px solid var(--line);padding:10px 0}
details:first-of-type{border-top:0;padding-top:0}
summary{cursor:pointer}
.number{display:inline-block;min-width:24px;text-align:center;font-weight:700;border:1px solid currentColor;
  border-radius:99px;padding:0 7px;margin-right:4px;font-size:13px}
.facts{display:grid;grid-template-columns:84px 1fr;gap:3px 14px;margin:10px 0 6px 8px;font-size:14px}
.facts dt{color:var(--quiet);grid-column:1}.facts dd{margin:0;grid-column:2;overflow-wrap:anywhere;
  white-space:pre-wrap}
code{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:.92em}
footer{font-size:13px;margin-top:8px}
@media print{section{break-inside:avoid}body{background:#fff}}
""" + "".join(f".s-{state}{{fill:var(--{state})}}.b-{state}{{background:var(--{state})}}\n" for state in STATES)
)
