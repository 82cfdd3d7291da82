"""Writes down when every definition in data/ was made and which of its rows existed by then: appends to
results/registrations.csv.

    python tools/registrations.py            append what is new or changed
    python tools/registrations.py --check    append nothing; name what is not registered, exit status 1
    python tools/registrations.py --from-git append what git knows and the register does not: definitions that were
                                             missed, words that other measures make untrue; write results/changed.csv

The first run reads the dates from git. From then on a line that is new or changed gets the date of the run that
registers it. Contrasts that are planned beside a study get their lines in its tables first. What stands in these is
what is meant, so that SHA256SUMS takes it. A line that was read from git later has git's date, and a `~` behind its
commit; it is added at the end, so that the file only grows.
"""
import csv
import functools
import hashlib
import io
import subprocess
import sys
from collections import ChainMap, defaultdict
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path

import pandas as pd
from moe_redistribution.models.condition import condition
from moe_redistribution.models.events import in_old_names
from moe_redistribution.evidence.claims import (Claim, check_claims, _check_statements, each_name, is_condition,
                                                seed_list)
from moe_redistribution.evidence.registrations import (ACCESS, COLUMNS, DEFINES, FILE, LATER, NOTES, REGISTERED_TABLES,
                                                       SENTENCES, SEALED, SPOT, TABLE_OF, WHOLE_FILES, _arm_of,
                                                       cells_read, changed_late, defined_in, _defines, definition_hash,
                                                       _definitions, _have_pilots, registrations, row_files,
                                                       seeds_measured, _sentence_hash, trained_as, unregistered_lines)
from moe_redistribution.evidence.design import check_design
from moe_redistribution.evidence.planned import planned_files
from moe_redistribution.evidence.printed import study_lines
from moe_redistribution.evidence.selection import run_rows
from moe_redistribution.record.ledger import BY_WORDS
from moe_redistribution.record.versions import NothingToLookAt, Versions, _never_registered, _seen_otherwise
from moe_redistribution.basics.errors import check_all
from moe_redistribution.basics.files import (as_committed, _listed_hashes, _relist, replace_file,
                                            write_whole)
from moe_redistribution.training.store import Store
from moe_redistribution.training.study import study_jobs

ROOT = Path(__file__).resolve().parent.parent
ROWS = ["results/rows", "results/runs"]


def git(*args):
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True)
    if done.returncode: sys.exit(f"git {' '.join(args[:2])}: {done.stderr.decode().strip()}")
    return done.stdout


class History:
    """Every commit behind HEAD with its parents, its date (UTC, that of the committer) and the files of data/ and
    results/."""

    def __init__(self):
        if git("rev-parse", "--is-shallow-repository").strip() == b"true":
            sys.exit("dates need the whole history; got a shallow clone; fix: git fetch --unshallow")
        lines = [line.split()
                 for line in git("log", "--topo-order", "--reverse", "--format=%H %h %ct %P").decode().splitlines()]
        self.parents = {sha: parents for sha, _, _, *parents in lines}       # oldest first
        self.short = {sha: short for sha, short, *_ in lines}
        self.date = {sha: utc(datetime.fromtimestamp(int(date), timezone.utc)) for sha, _, date, *_ in lines}
        self.head = git("rev-parse", "HEAD").decode().strip()
        self.files = {sha: self._files(sha) for sha in self.parents}
        self.versions = defaultdict(dict)                                    # path -> blob -> date, oldest first
        for sha in sorted(self.parents, key=self.date.get):
            for path, blob in self.files[sha].items(): self.versions[path].setdefault(blob, self.date[sha])
        self._cat = subprocess.Popen(["git", "cat-file", "--batch"], cwd=ROOT, stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE)

    def _files(self, sha):
        lines = git("ls-tree", "-r", "-z", sha, "--", "data", *ROWS).decode().split("\0")[:-1]
        return {path: meta.split()[2] for meta, path in (line.split("\t") for line in lines)}

    def read(self, blob):
        self._cat.stdin.write(f"{blob}\n".encode())
        self._cat.stdin.flush()
        size = int(self._cat.stdout.readline().split()[2])
        return io.BytesIO(self._cat.stdout.read(size + 1)[:-1])

    @lru_cache(maxsize=None)                                                     # noqa: B019  one object a command
    def defined(self, table, blob):
        "(key, protocol) -> hash of its definition, in one version of a file."
        return defined_in(table, self.read(blob).read().decode())

    def holds(self, sha, table, key, own):
        "Does a commit define a line so?"
        return any(self.defined(table, blob).get(key) == own for path, blob in self.files[sha].items()
                   if (found := TABLE_OF.fullmatch(path)) and found[1] == table)

    def since(self, table):
        "(key, protocol) -> its hash at HEAD and the oldest commit from which every step to HEAD has it."
        out, holds = {}, lambda path: (found := TABLE_OF.fullmatch(path)) and found[1] == table
        at = {sha: ChainMap(*(self.defined(table, blob) for path, blob in files.items() if holds(path)))
              for sha, files in self.files.items()}
        order = {sha: (self.date[sha], i) for i, sha in enumerate(self.parents)}
        for key, own in at[self.head].items():
            same, left = {self.head}, [self.head]
            while left:
                more = {p for p in self.parents[left.pop()] if p not in same and at[p].get(key) == own}
                same |= more
                left += more
            out[key] = own, min(same, key=order.get)
        return out


def utc(moment): return moment.isoformat(timespec="seconds")


class Rows:
    "When the first row of a cell was there: committed, or (`now`) in this folder."

    def __init__(self, history, now):
        self.history, self.now, self.known, self.seeds = history, now, {}, {}
        lie = [*history.versions, *(p.relative_to(ROOT).as_posix() for p in (ROOT / "results/rows").glob("*/*"))]
        self.instruments = {"runs", "ablation", *(p.split("/")[2] for p in lie if p.startswith("results/rows/"))}

    def _versions(self, path):
        "Every version of a file as (date, content), oldest first."
        for blob, date in self.history.versions[path].items(): yield date, lambda blob=blob: self.history.read(blob)
        if (ROOT / path).exists(): yield self.now, lambda: as_committed(ROOT / path)

    def _cells(self, path, instrument, name, date, content):
        own = [("condition", "in", [name, in_old_names(name)])]
        if instrument != "runs": got = pd.read_parquet(content(), columns=["condition", *SPOT, "seed"], filters=own)
        elif len(got := pd.read_parquet(content(), filters=own)): got = run_rows(got)
        else: got = pd.DataFrame(columns=[*SPOT, "seed"])                   # no run, and none of its columns
        return got[[*SPOT, "seed"]].drop_duplicates().assign(date=date)

    def of(self, instrument, name):
        "(stream, rule, metric, site, edit) -> seed -> date of its first row, for one condition."
        if (instrument, name) not in self.known:
            found = [self._cells(p, instrument, name, *v)
                     for p in row_files(instrument, name) for v in self._versions(p)]
            own = self.known[instrument, name] = defaultdict(dict)
            first = (pd.concat(found).sort_values("date", kind="stable").drop_duplicates([*SPOT, "seed"])
                     if found else [])
            for *spot, seed, date in first.itertuples(index=False) if len(first) else (): own[tuple(spot)][seed] = date
        return self.known[instrument, name]

    def first(self, cell):
        "Date of the first row of any of a cell's seeds, None where there is none."
        instrument, name, *spot, seeds = cell
        got = self.of(instrument, name).get(tuple(spot), {})
        return min((got[s] for s in seed_list(seeds) if s in got), default=None)

    def _measured(self, path):
        "(date, `seeds_measured`) of every version of a file."
        if path not in self.seeds: self.seeds[path] = [(d, seeds_measured(get())) for d, get in self._versions(path)]
        return self.seeds[path]

    def other(self, cell):
        "Date of the first row, by any instrument and measure, of what a cell's condition trained at any of its seeds."
        _, name, stream, *_, seeds = cell
        own, wanted = (trained_as(name), stream), {*seed_list(seeds)}
        paths = {p for i in self.instruments for n in (name, own[0]) for p in row_files(i, n)}
        return min((d for p in paths for d, held in self._measured(p) if held.get(own, set()) & wanted), default=None)


def has_run(claim):
    "Does any run of what a claim reads lie in this machine's store, recorded or not?"
    store = Store()
    for r in claim.readings if claim.stream != "none" else ():
        for name in each_name(r.condition):
            if is_condition(name): paths = [store.path(condition(name), s, r.stream) for s in seed_list(r.seeds)]
            elif own := _arm_of(name):
                paths = [j.path(store) for j in study_jobs(*own) if {*j.seeds} & {*seed_list(r.seeds)}]
            else: continue
            if any(p.exists() for p in paths): return True
    return False


def access(dates, date, others=(), pilot=False, ran=False):
    """How much of what a line reads was there at `date`; `dates`: the first row of each cell, None where there is none;
    `others`: the same by any measure; `pilot`: trials of its question were known; `ran`: some runs lay in the store."""
    known = [d for d in dates if d]
    if not dates: return "no rows"
    if (not known or date < min(known)) and any(d and d <= date for d in others): return "other measures seen"
    if not known and ran: return "runs not opened"
    if not known or date < min(known): return "pilot seen" if pilot else "nothing run"
    return "results seen" if len(known) == len(dates) and date >= max(known) else "in part"


def known_then(rows, cells, key, date, ran=False):
    "The word of `access` for a line that reads `cells`."
    return access([rows.first(c) for c in cells], date, map(rows.other, cells), bool(_have_pilots([key]).any()), ran)


def take_as_meant():
    "Lists the tables of definitions, and that of pilots, as they stand: who registers a line has changed it."
    if not (listing := ROOT / "SHA256SUMS").exists(): return
    for path in [p for t in (*REGISTERED_TABLES, "pilots") for p in (ROOT / "data").glob(f"*/{t}.csv")]:
        name = path.relative_to(ROOT).as_posix()
        now, was = hashlib.sha256(path.read_bytes()).hexdigest(), _listed_hashes(listing).get(name, set())
        if was != {now}: _relist(listing, name, add={now}, drop=was - {now})


def left(): return unregistered_lines(ROOT / FILE, ROOT / "data")


def present(table): return study_lines(table, ROOT / "data")


def answers():
    "Keys of statements with a recorded answer, from rows of their own or of numbers that they quote."
    path = ROOT / "results/ledger.csv"
    return set(pd.read_csv(as_committed(path)).query("paper_n > 0 or numbers == numbers")["key"]) if path.exists() else set()


def recorded_arms():
    "Conditions of which there is any row."
    path = ROOT / "results/manifest.csv"
    return set(pd.read_csv(as_committed(path))["condition"]) if path.exists() else set()


def new_lines(now):
    "A registration for every line of data/ that has none as it stands, in the order of the files."
    history, out = History(), []
    rows, begun = Rows(history, now), (ROOT / FILE).exists()
    quoted = {c.key: c for c in Claim.of(present("claims")) if c.protocol == "paper"}
    missing = set(left()[["table", "key", "protocol"]].itertuples(index=False, name=None))
    for table in REGISTERED_TABLES:
        dated = history.since(table)
        for line in Claim.of(present(table)):
            key = line.key, line.protocol
            if (table, *key) not in missing: continue
            own = definition_hash(line._asdict())
            before, sha = dated.get(key, ("", history.head))
            kept = before == own                              # HEAD holds it as it stands
            date = history.date[sha] if kept and not begun else now
            commit = history.short[sha if kept and not begun else history.head] + "+" * (not kept)
            out.append((table, *key, own, date, commit,
                        known_then(rows, cells_read(line, quoted), key[0], date, date == now and has_run(line))))
    answered = answers()
    for line in Claim.of(present("statements")):                         # what is known when words are written down
        if (SENTENCES, line.key, line.protocol) not in missing: continue
        word = ("no rows" if line.aggregate == "none" else "results seen" if line.key in answered
                else "pilot seen" if _have_pilots([line.key]).any() else "nothing run")
        out.append((SENTENCES, line.key, line.protocol, _sentence_hash(line._asdict()), now,
                    history.short[history.head] + "+", word))
    have = recorded_arms()
    for table, key, protocol, own in left()[["table", "key", "protocol", "hash"]].itertuples(index=False, name=None):
        if table not in (SEALED, NOTES, WHOLE_FILES): continue
        word = "results seen" if any(n == key or n.startswith((f"{key}/", f"{key}@")) for n in have) else "nothing run"
        out.append((table, key, protocol, own, now, history.short[history.head] + "+",
                    word if table == SEALED else "no rows"))
    return sorted(out, key=lambda r: (r[4], r[1], r[0], r[2]))


def from_git(now):
    "Lines for definitions that a commit held and the register has not, and for words that other measures make untrue."
    versions, history, out = Versions(ROOT), History(), []
    rows, quoted = Rows(history, now), {c.key: c for c in Claim.of(present("claims")) if c.protocol == "paper"}
    tables = {}
    for table, key, protocol, own, path, sha in _never_registered(versions):
        if (path, sha) not in tables:
            lines = pd.read_csv(io.BytesIO(git("show", f"{sha}:{path}")), dtype=str, keep_default_na=False)
            lines = lines if "instrument" in lines else lines.assign(instrument="ablation")
            tables[path, sha] = {(c.key, c.protocol): c for c in Claim.of(lines)}
        date, cells = history.date[sha], cells_read(tables[path, sha][key, protocol], quoted)
        out.append((table, key, protocol, own, date, history.short[sha] + LATER, known_then(rows, cells, key, date)))
    last = {r[:3]: r[3:5] for r in registrations(ROOT / FILE).itertuples(index=False, name=None)}
    for table, key, protocol, _, away, *_ in out[:]:                    # one that was put back has been changed twice
        own, date = last.get((table, key, protocol), ("", away))
        if date >= away: continue
        sha = next(s for s in versions.all if history.date[s] > away and history.holds(s, table, (key, protocol), own))
        line, = [c for c in Claim.of(present(table)) if (c.key, c.protocol) == (key, protocol)]
        out.append((table, key, protocol, own, date := history.date[sha], history.short[sha] + LATER,
                    known_then(rows, cells_read(line, quoted), key, date)))
    out += [(r.table, r.key, r.protocol, r.hash, r.date, r.commit.rstrip("+" + LATER) + LATER, "other measures seen")
            for r in _seen_otherwise(versions)]
    return sorted(out, key=lambda r: (r[4], r[1], r[0], r[2]))


def asked_by(own, states):
    "In words, what a state of a claim (protocol -> what defines it) has that not all of its states have."
    parts = []
    for protocol in own:
        each = [s[protocol] for s in states if protocol in s]
        differ = [c for c in DEFINES if len({str(d.get(c)) for d in each}) > 1]
        if differ or len(each) < len(states):
            parts.append(" ".join([protocol, *(f"{c}={own[protocol].get(c, 'none')}" for c in differ)]))
    return "; ".join(parts)


def former_words():
    "Lines of results/changed.csv about words that changed while every definition stayed; no commit can tell their reason."
    if not (path := ROOT / "results/changed.csv").exists(): return []
    with path.open(newline="") as f: return [tuple(x.values()) for x in csv.DictReader(f) if x["asked"] == BY_WORDS]


def former_verdicts(versions):
    """key, since, commit, asked, verdict, reason: what ledgers in git said of each claim that was changed after rows were read,
    under definitions that no longer stand, oldest first."""
    shas = git("log", "--reverse", "--first-parent", "--format=%H", "--", "results/ledger.csv").decode().split()
    states = {}                                                           # key -> [(definitions, commit, verdict)]
    for sha in shas:
        tree, said = versions.tree(sha), defaultdict(dict)
        for path, blob in tree.items():
            if (found := TABLE_OF.fullmatch(path)) and found[1] == "statements":
                for line in csv.DictReader(io.StringIO(versions.read(blob).decode(), newline="")):
                    if changed_late(line["key"], ROOT / FILE): said[line["key"]][line["protocol"]] = _defines(line)
        ledger = csv.DictReader(io.StringIO(versions.read(tree["results/ledger.csv"]).decode(), newline=""))
        verdict = {line["key"]: line["verdict"] for line in ledger}
        for key, own in said.items():
            had = states.setdefault(key, [])
            if had and had[-1][0] == own: had[-1][2].append(verdict.get(key, "none"))
            else: had.append((own, sha, [verdict.get(key, "none")]))
    return [(key, utc(versions.date(sha)), sha[:8], f"as {asked_by(own, [s[0] for s in had])}",
             ", then ".join(dict.fromkeys(words)), "")
            for key, had in sorted(states.items()) for own, sha, words in had[:-1]]


def empty_designs(todo):
    "Design faults of the lines of `todo` that were never registered before; older ones are on the page of the check."
    new = todo.loc[(todo["registered"] == "") & todo["table"].isin(REGISTERED_TABLES), ["table", "key"]]
    return check_design(set(new.itertuples(index=False, name=None)), ROOT / "data") if len(new) else new


def counts():
    "Lines with an answer of their own by protocol and access, contrasts apart from other claims."
    kind = lambda r: "contrasts" if r.table == "claims" and r.key.startswith("contrast.") else r.table
    asks = {(t, k, p) for t in REGISTERED_TABLES
            for k, p, a in present(t)[[REGISTERED_TABLES[t], "protocol", "aggregate"]].itertuples(index=False)
            if a not in ("none", "quotes")}
    last = [r for r in registrations(ROOT / FILE).itertuples(index=False) if (r.table, r.key, r.protocol) in asks]
    frame = pd.DataFrame([(kind(r), r.protocol, r.access) for r in last], columns=["lines", "protocol", "access"])
    table = pd.crosstab([frame["lines"], frame["protocol"]],
                        frame["access"]).reindex(columns=list(ACCESS), fill_value=0)
    return table.assign(all=table.sum(axis=1))


def write_planned(args):
    "Writes the lines of planned contrasts that tables lack; with --check, or where one is refused, it writes nothing."
    try: new = planned_files(ROOT / "data")
    except ValueError as e: sys.exit(f"Nothing registered.\n{e}")
    for path, text in new.items() if "--check" not in args else (): replace_file(path, text.encode())
    return [f"{p.relative_to(ROOT).as_posix()} lacks lines of planned contrasts" for p in new]


def check_tables():
    "Every rule that a definition breaks, a line each, and a register that cannot be read, before any work."
    tables = {t: sorted((ROOT / "data").glob(f"*/{t}.csv")) for t in REGISTERED_TABLES}
    try: check_all(lambda: check_claims(tables["claims"]), lambda: _check_statements(tables["statements"]),
                   lambda: registrations(ROOT / FILE))
    except ValueError as e: sys.exit(f"Nothing registered.\n{e}")


def or_nothing(work):
    "Where it ends in an error and has registered nothing, tables and the list of sums are as they were before."
    @functools.wraps(work)
    def whole(args):
        register, tables = ROOT / FILE, (ROOT / "data").glob
        def files(): return {p: p.read_bytes() for p in (register, ROOT / "SHA256SUMS", *tables("*/*.csv")) if p.exists()}
        before = files()
        try: return work(args)
        except BaseException:
            if (now := files()).get(register) == before.get(register):
                for path in now.keys() - before.keys():                        # of a new study, with its folder
                    path.unlink()
                    if not any(path.parent.iterdir()): path.parent.rmdir()
                for path in (p for p in before if now.get(p) != before[p]): replace_file(path, before[path])
            raise
    return whole


@or_nothing
def main(args):
    planned = write_planned(args)
    check_tables()
    if "--check" not in args: take_as_meant()
    todo = left()
    if "--check" in args:
        wanting = [*planned, *(" ".join(r) for r in todo[["table", "key", "protocol"]].to_numpy())]
        print("\n".join(wanting) or "Every line is registered as it stands.")
        return int(len(wanting) > 0)
    now, path, last = utc(datetime.now(timezone.utc)), ROOT / FILE, registrations(ROOT / FILE)["date"].max()
    if now < str(last) and path.exists():
        sys.exit(f"dates ascend; the clock says {now}, before {last}; fix: set the clock")
    if len(faults := empty_designs(todo)):
        sys.exit("Nothing registered: a new line of data/ could decide nothing.\n" + "\n".join(
            f"  {f.key} ({f.protocol}) {f.rule}: got {f.got}; fix: {f.fix}" for f in faults.itertuples()))
    try: lines = from_git(now) if "--from-git" in args else new_lines(now) if len(todo) else []
    except NothingToLookAt as e: sys.exit(f"git is what is read; got {e}")
    old = as_committed(path).read_bytes() if path.exists() else b""
    csv.writer(new := io.StringIO(), lineterminator="\n").writerows([*([] if old else [COLUMNS]), *lines])
    write_whole(path, old + new.getvalue().encode())
    if "--from-git" in args:
        csv.writer(former := io.StringIO(), lineterminator="\n").writerows(
            [("key", "since", "commit", "asked", "verdict", "reason"), *former_verdicts(Versions(ROOT)), *former_words()])
        write_whole(ROOT / "results/changed.csv", former.getvalue().encode())
    print(f"{len(lines)} lines appended to {FILE}, which holds {len(_definitions(ROOT / 'data'))} definitions as they "
          "stand; those with an answer:\n")
    print(counts().to_string())
    if lines: print("\nThe page shows them after: make outputs NB=nbs/06_evidence/04_registrations.ipynb")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
