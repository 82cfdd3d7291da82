"""`python(...)` is `subprocess.run([sys.executable, ...])`, without the two seconds of CPU in which a new process imports torch and pandas.

A server that has imported these and nothing of this library forks for whoever asks. What comes of `-W`, of a hash's seed or of what
is imported at all, only a new process says."""
import json
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

def serve():
    "Reads what to run, a line of JSON each; answers with its exit status and its CPU seconds."
    import pandas, torch  # noqa: E401, F401
    own, answers = [p for p in sys.path[1:]], os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = json.loads(line)
        before = sum(os.times()[2:4])
        if not (child := os.fork()): carry_out(own, **asked)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, sum(os.times()[2:4]) - before, file=answers, flush=True)

def carry_out(own, words, cwd, env, said):
    "In the child: as `python words...` there, with this environment, and what it says in these two files."
    import atexit, runpy, threading, traceback, types  # noqa: E401
    for fd, path in enumerate(said, 1): os.dup2(os.open(path, os.O_WRONLY), fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(cwd), os.environ.clear(), os.environ.update(env)
    how, *sys.argv = ("", *words) if words[0][0] != "-" else words
    sys.path[:] = [str(Path(sys.argv[0]).parent) if not how else cwd if how == "-m" else "",
                   *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *own]
    status = 0
    try:
        if how == "-m": runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            code, sys.argv[0] = sys.argv[0], "-c"
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), main.__dict__)
        else: runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str): print(e.code, file=sys.stderr)
    except BaseException: status = traceback.print_exc() or 1
    threading._shutdown(), atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)

@lru_cache(None)
def server():
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.Popen([sys.executable, __file__], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

def python(*words, cwd=None, env=None) -> subprocess.CompletedProcess:
    "What `python words...` says, as text, with its exit status."
    import cpu
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        words = [str(w) for w in words]
        asked = dict(words=words, cwd=str(cwd or os.getcwd()), env=dict(os.environ if env is None else env), said=[out.name, err.name])
        print(json.dumps(asked), file=server().stdin, flush=True)
        status, took = server().stdout.readline().split()
        cpu.ELSEWHERE.append(float(took))
        return subprocess.CompletedProcess(words, int(status), *(Path(x.name).read_text() for x in (out, err)))

if __name__ == "__main__": serve()
