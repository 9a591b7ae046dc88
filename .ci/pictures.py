"""The two pictures of README, from the JSON files of a finished (or stopped) run.

    python .ci/pictures.py RUN_FOLDER TARGET_FOLDER        training.svg and result.svg

They have a ground of their own, so that they read on a dark page too, and tell apart by shape and
word, never by colour alone. A picture whose files the run has not reached is left out, and said.
"""
import html
import json
import math
import sys
import textwrap
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import rlhf

THANKS = "Thank you for asking so kindly."
ACTORS = {"base": "base", "sft": "SFT", "ppo": "PPO"}
STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;"
    "fill:#1b2025;font-variant-numeric:tabular-nums;paint-order:stroke;stroke:#fbfbf9;"
    "stroke-width:3px}.head{font-size:17px;font-weight:600}"
    ".soft{fill:#59626b}path{fill:none;stroke:currentColor;stroke-width:1.5}"
    ".grid{stroke:#dfe2de;stroke-width:1}.raw{opacity:.35;stroke-width:1}"
    ".thick{stroke-width:2.4;stroke-linejoin:round}.way{stroke-dasharray:2 5}"
    ".ink{color:#1b2025}.base{color:#59626b}.sft{color:#0067a3}.ppo{color:#b34a00}"
    "path.full{fill:currentColor}path.hollow{fill:#fbfbf9;stroke-width:1.8}")
MARKS = {"base": "m-5,-5h10v10h-10z", "sft": "m-5.5,0a5.5,5.5 0 1 0 11,0a5.5,5.5 0 1 0 -11,0",
         "ppo": "m0,-7l7,7l-7,7l-7,-7z"}          # square, circle, diamond, as on the page


def picture(title: str, told: str, parts: list[str], note: str) -> str:
    """An SVG that needs nothing else; `told` is what a screen reader says of it. Which model it
    speaks of stands under every picture."""
    escape = html.escape
    below = [written(20, 470 + 18 * k, line) for k, line in enumerate(textwrap.wrap(note, 104))]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 504" width="720" '
            f'height="504" role="img" aria-labelledby="title told"><title id="title">'
            f'{escape(title)}</title><desc id="told">{escape(f"{told}. {note}")}</desc>'
            f'<style>{STYLE}</style><rect x=".5" y=".5" width="719" height="503" rx="8" '
            f'fill="#fbfbf9" stroke="#d8dbd6"/>\n'
            + "\n".join([written(20, 30, title, "head"), *parts, *below]) + "\n</svg>\n")


def written(x: float, y: float, text: str, look: str = "soft", anchor: str = "start") -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" class="{look}" text-anchor="{anchor}">'
            f'{html.escape(text)}</text>')


def drawn(points: list[tuple[float, float]], look: str) -> str:
    return f'<path class="{look}" d="M' + "L".join(f"{x:.1f},{y:.1f}" for x, y in points) + '"/>'


def scale(values: list[float], start: float, end: float):
    """(value -> place between start and end, round values for the axis)."""
    low, high = min(values), max(values)
    spare = 0.06 * (high - low) or 0.5
    low, high = low - spare, high + spare
    power = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(k * power for k in (1, 2, 5, 10) if 6 * k * power >= high - low)
    marks = [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return lambda value: start + (value - low) / (high - low) * (end - start), marks


def succeeds(response: dict) -> bool:
    """The rubric of a sampled answer; families OH000 to OH239 come 40 an action."""
    action = int(response["prompt_id"][2:5]) // 40
    verdict = rlhf.evaluate_response(response["text"], response["finish_reason"], action)
    return verdict["rubric_success"]


def training_picture(rollouts: list[dict], note: str) -> str:
    """The same sampled answers, judged twice, over PPO: thin raw, thick the mean of neighbours."""
    reach, parts, told = max(1, round(len(rollouts) / 20)), [], []
    iterations, share = [rollout["iteration"] for rollout in rollouts], "{:.0%}".format
    across, marks = scale(iterations, 76, 580)
    panels = {
        "judge's score: what PPO optimises": (lambda r: r["score"], "ppo", "{:+.1f}".format),
        "rubric success: what training never sees": (succeeds, "sft", share),
        "answers that say thanks: the rubric gives nothing for it": (
            lambda r: THANKS in r["text"], "base", share)}
    for k, (heading, (value, colour, text)) in enumerate(panels.items()):
        top, values = 78 + 128 * k, [fmean(map(value, r["responses"])) for r in rollouts]
        smooth = [fmean(values[max(0, i - reach):i + reach + 1]) for i in range(len(values))]
        up, levels = scale([0, 1] if text is share else values, top + 82, top)
        place = lambda numbers: [(across(i), up(n)) for i, n in zip(iterations, numbers)]
        change = f"{text(smooth[0])} \u2192 {text(smooth[-1])}"
        told.append(f"{heading}: {change}")
        parts.append(written(20, top - 12, heading, ""))
        for level in (0, 0.5, 1) if text is share else levels:
            parts += [drawn([(76, up(level)), (580, up(level))], "grid"),
                      written(68, up(level) + 4, share(level) if text is share else f"{level:+g}",
                              anchor="end")]
        parts += [f'<g class="{colour}">', drawn(place(values), "raw"),
                  drawn(place(smooth), "thick"), "</g>",
                  written(592, up(smooth[-1]) + 4, change, "")]
    parts += [written(across(m), 440, f"{m:g}", anchor="middle")
              for m in marks if m >= 1 and m == int(m)]
    parts.append(written(592, 440, "iteration"))
    return picture("While PPO learned: the same sampled answers, judged twice", "; ".join(told),
                   parts, note)


def result_picture(results: dict, note: str) -> str:
    """Held-out answers of base, SFT and PPO: judge's score to the right, rubric success upward."""
    spots = [(population, actor, *((cell[key], cell[f"{key}_ci"]) for key in
                                   ("mean_learned_reward", "rubric_success_rate")))
             for population in ("probe_contexts", "test") for actor in ACTORS
             for cell in [results[actor][population]]]
    across, marks = scale([x for *_, (_, ends), _ in spots for x in ends], 76, 690)
    up, _ = scale([0, 1], 400, 76)
    parts = [written(20, 54, "Up: more answers pass the rubric. Right: the judge likes them better."
                             " Right and down: a shortcut."),
             written(20, 80, "rubric success", ""), written(690, 444, "judge's score", "", "end")]
    for level in (0, 0.25, 0.5, 0.75, 1):
        parts += [drawn([(76, up(level)), (690, up(level))], "grid"),
                  written(68, up(level) + 4, f"{level:.0%}", anchor="end")]
    parts += [written(across(m), 424, f"{m:+g}", anchor="middle") for m in marks]
    told = []
    for population, shape in (("probe_contexts", "hollow"), ("test", "full")):
        here = [spot[1:] for spot in spots if spot[0] == population]
        parts.append(drawn([(across(s), up(r)) for _, (s, _), (r, _) in here], "ink way"))
        for actor, (score, score_ci), (success, success_ci) in here:
            x, y = across(score), up(success)
            told.append(f"{population.replace('_', ' ')}, {ACTORS[actor]}: judge score "
                        f"{score:+.2f}, rubric success {success:.0%}")
            parts += [f'<g class="{actor}"><title>{told[-1]}</title>',
                      drawn([(across(end), y) for end in score_ci], ""),
                      drawn([(x, up(end)) for end in success_ci], ""),
                      f'<path class="{shape}" d="M{x:.1f},{y:.1f}{MARKS[actor]}"/>', "</g>",
                      written(x + 9, y - 9, ACTORS[actor], "")]
    parts.append(written(20, 444, "Filled: test prompts; hollow: probe contexts. "
                                  "Bars: 95 % over families."))
    return picture("Score and truth: base, SFT and PPO on held-out prompts", "; ".join(told),
                   parts, note)


def main(run: Path, target: Path) -> None:
    read = lambda path: json.loads(path.read_text(encoding="utf-8"))
    note, results = read(run / "run.json")["note"], run / "evaluation" / "results.json"
    rollouts = [read(path) for path in sorted((run / "ppo" / "rollouts").glob("*.json"))]
    target.mkdir(parents=True, exist_ok=True)
    pictures = {"training.svg": training_picture(rollouts, note) if rollouts else None,
                "result.svg": result_picture(read(results), note) if results.exists() else None}
    for name, text in pictures.items():
        if text:
            (target / name).write_text(text, encoding="utf-8", newline="\n")
        print(target / name if text else f"{name}: not in this run yet")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
