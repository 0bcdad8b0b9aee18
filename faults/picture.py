"""What a run looked like: one self-contained SVG, and a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any

from faults.record import Record

if TYPE_CHECKING:
    from faults.judge import Verdict

WIDTH, LANE, TOP, LEFT = 1200, 84, 92, 96
LEGEND = "▼ call issued   ● fault   ✕ error   bars: calls (clean blue, armed red, healed green)"
BEATS = {"clean": "#dfe8f2", "armed": "#f7e2dc", "bystanders": "#eeeeee", "healed": "#dff0e0"}
PHASES = {
    "issue": "#1f77b4",
    "encode": "#9467bd",
    "send": "#2ca02c",
    "send_phase_two": "#98df8a",
    "receive": "#ff7f0e",
    "receive_phase_two": "#ffbb78",
    "decode": "#8c564b",
    "reduce": "#e377c2",
    "verdict": "#17becf",
}


def _times(record: Record) -> tuple[float, float]:
    at = [e["at_s"] for events in (*record.events.values(), record.launch) for e in events]
    return (min(at), max(max(at), min(at) + 1e-3)) if at else (0.0, 1.0)


def draw(record: Record, verdict: Verdict) -> str:
    """A lane a rank: calls as bars, phases as ticks, calls issued as triangles, faults and errors marked."""
    first, last = _times(record)
    scale = (WIDTH - LEFT - 24) / (last - first)
    ranks = record.scenario.world_size
    height = TOP + ranks * LANE + 60
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="16">{escape(record.scenario.id)}: {escape(record.scenario.summary)}</text>',
        f'<text x="12" y="44" font-size="12" fill="{"#2a7d2e" if verdict.ok else "#b3261e"}">'
        f"{escape('good' if verdict.ok else '; '.join(verdict.complaints())[:180])}</text>",
    ]
    for i, (name, colour) in enumerate(PHASES.items()):
        x = LEFT + i * 121
        out.append(f'<rect x="{x}" y="58" width="3" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 7}" y="68" font-size="11">{name}</text>')
    out.append('<text x="12" y="84" font-size="11">{LEGEND}</text>')

    def x_of(at_s: float) -> float:
        return round(LEFT + (at_s - first) * scale, 2)

    def titled(shape: str, text: str) -> str:
        return shape[:-2] + f"><title>{escape(text)}</title></{shape[1:].split(' ')[0]}>"

    for rank in range(ranks):
        top = TOP + rank * LANE
        middle = top + LANE // 2
        out.append(f'<text x="12" y="{middle + 4}" font-size="13">rank {rank}</text>')
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{middle}" y2="{middle}" stroke="#cccccc"/>')
        events = record.events.get(rank, [])
        for e in events:
            if e["event"] == "done":
                x0, x1 = x_of(e["at_s"] - e["took_s"]), x_of(e["at_s"])
                text = f"{e['beat']}: {e['operation']} #{e['sequence']}, {e['took_s'] * 1000:.1f} ms, {e['outcome']}"
                text += f": {e['text']}" if e["outcome"] == "error" else ""
                bar = f'<rect x="{x0}" y="{top + 14}" width="{max(x1 - x0, 1):.2f}" height="{LANE - 28}" '
                edge = "#b3261e" if e["outcome"] == "error" else "#555555"
                out.append(titled(f'{bar}fill="{BEATS[e["beat"]]}" stroke="{edge}" stroke-width="0.6"/>', text))
        for e in events:
            if e["event"] == "phase" and e["phase"] in PHASES:
                x = x_of(e["at_s"])
                line = f'<line x1="{x}" x2="{x}" y1="{middle - 18}" y2="{middle + 18}" '
                text = f"{e['phase']} {e['operation']} #{e['sequence']} peer {e['peer']}"
                out.append(titled(f'{line}stroke="{PHASES[e["phase"]]}" stroke-width="1.2"/>', text))
            if e["event"] == "phase" and e["phase"] == "issue":
                x = x_of(e["at_s"])
                out.append(f'<path d="M{x} {top + 12} l-4 -8 h8 z" fill="#1f77b4"/>')
        for e in events:
            if e["event"] == "fired":
                shape = f'<circle cx="{x_of(e["at_s"])}" cy="{middle}" r="6" fill="#d32f2f" stroke="white"/>'
                out.append(titled(shape, f"fault {e['kind']} at {e['phase']} #{e['sequence']}"))
            if e["event"] == "done" and e["outcome"] == "error":
                x = x_of(e["at_s"])
                out.append(f'<path d="M{x - 5} {top + 6} l10 10 m0 -10 l-10 10" stroke="#b3261e" stroke-width="2"/>')
    for e in record.launch:
        if e["event"] in ("exit", "stopped", "resumed", "hung", "stopped_for_good"):
            x, middle = x_of(e["at_s"]), TOP + e["rank"] * LANE + LANE // 2
            line = f'<line x1="{x}" x2="{x}" y1="{middle - 34}" y2="{middle + 34}" '
            out.append(f'{line}stroke="#000000" stroke-width="1.5" stroke-dasharray="4 2"/>')
            label = e.get("how") or e["event"]
            out.append(f'<text x="{x + 3}" y="{middle - 26}" font-size="11">{escape(label)}</text>')
    bottom = TOP + ranks * LANE + 14
    for i in range(11):
        at = first + (last - first) * i / 10
        out.append(f'<line x1="{x_of(at)}" x2="{x_of(at)}" y1="{TOP}" y2="{bottom - 6}" stroke="#eeeeee"/>')
        out.append(
            f'<text x="{x_of(at)}" y="{bottom + 8}" font-size="11" text-anchor="middle">{at - first:.2f} s</text>'
        )
    return "\n".join([*out, "</svg>\n"])


def trace(record: Record) -> str:
    """Trace Event Format: a process a rank; calls as slices, phases and faults as instants."""
    first, _ = _times(record)
    events: list[dict[str, Any]] = []

    def us(at_s: float) -> float:
        return round((at_s - first) * 1e6, 1)

    for rank in range(record.scenario.world_size):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for e in record.events.get(rank, []):
            rest = {k: v for k, v in e.items() if k not in ("event", "at_s", "link", "stats", "entries")}
            if e["event"] in ("done", "made", "closed"):
                name = f"{e['operation']} #{e['sequence']}" if e["event"] == "done" else e["event"]
                slice_ = {"ph": "X", "pid": rank, "tid": 0, "name": name, "cat": e["beat"], "args": rest}
                events.append({**slice_, "ts": us(e["at_s"] - e["took_s"]), "dur": round(e["took_s"] * 1e6, 1)})
            elif e["event"] in ("phase", "fired", "armed", "disarmed"):
                name = {"phase": e.get("phase"), "fired": f"FAULT {e.get('kind')}"}.get(e["event"], e["event"])
                tid = 1 if e["event"] == "phase" else 2
                events.append(
                    {
                        "ph": "i",
                        "s": "p" if e["event"] == "fired" else "t",
                        "pid": rank,
                        "tid": tid,
                        "name": name,
                        "cat": e["event"],
                        "ts": us(e["at_s"]),
                        "args": rest,
                    }
                )
    for e in record.launch:
        if "rank" in e:
            name = f"{e['event']} {e.get('how', '')}".strip()
            events.append({"ph": "i", "s": "p", "pid": e["rank"], "tid": 2, "name": name, "ts": us(e["at_s"])})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
