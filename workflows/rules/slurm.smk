# What Snakemake's process does for a run as Slurm jobs.
import os
import signal
import subprocess
import sys
import threading
import time

PREEMPTED_S = 30.0  # a job that Slurm will run again is not PREEMPTED for longer
DRIVERS = []


def drive():
    """Start `repro driver`. It ends with this process, however that ends."""
    command = [sys.executable, "-m", "repro", "driver", PLAN["results"]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    driver = subprocess.Popen(command, **pipes, start_new_session=True)  # Ctrl-C is for this process
    if driver.stdout.readline() != "driving\n":
        raise WorkflowError("This run cannot be driven from here now; `repro driver` has said why, above.")
    DRIVERS.append(driver)
    threading.Thread(target=end_with, args=(driver,), daemon=True).start()


def end_with(driver):
    """Without a driver, another Snakemake would take the jobs of this one for left over, and cancel them."""
    driver.wait()
    if driver in DRIVERS:
        print(
            "`repro driver` has ended: no more jobs are submitted; start it again when these are done", file=sys.stderr
        )
        os.kill(os.getpid(), signal.SIGTERM)


def end_driving():
    """Have the driver find causes for dead jobs, and end."""
    while DRIVERS:
        driver = DRIVERS.pop()
        driver.communicate("settle\n")
        if driver.returncode:
            raise WorkflowError(
                "`repro driver` failed: causes of dead jobs are recorded when the run is started again."
            )


def hear_of_ends(requeue):
    """Make Snakemake's plugin (2.8.0) hear of ends of jobs that it would never notice, or would answer badly. `requeue`: Slurm runs
    preempted and failed jobs again by itself.

    - Slurm cannot tell: the plugin would forget all jobs; told nothing of each, it asks again.
    - "CANCELLED by 1000", as sacct says it, is no state that the plugin knows.
    - A job that stays PREEMPTED has ended, where Slurm does not run such jobs again.
    - NODE_FAIL: the plugin would exclude all nodes of the job from later ones, and cut their list at 256 letters.
    """
    import snakemake_executor_plugin_slurm as plugin

    ask, since = plugin.query_job_status, {}

    async def ask_again(*arguments, **options):
        states, seconds = await ask(*arguments, **options)
        if states is None:
            return {}, 0.0
        for job_id, said in states.items():
            state = states[job_id] = said.split(" ")[0]
            if state != "PREEMPTED":
                since.pop(job_id, None)
            elif not requeue and time.monotonic() - since.setdefault(job_id, time.monotonic()) >= PREEMPTED_S:
                states[job_id] = "CANCELLED"
            if state == "NODE_FAIL":
                states[job_id] = "REQUEUED" if requeue else "FAILED"  # the first: no end
        return states, seconds

    plugin.query_job_status = ask_again
