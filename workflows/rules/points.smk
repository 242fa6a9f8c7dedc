# Points as local processes: a rule for each experiment, a job for each point.


def arguments(wildcards, output):
    """Params function: arguments of `repro run`. It asks `output`, so Snakemake does not remember them: see below."""
    return JOBS[output[0]]["arguments"]


def unfinished(experiment):
    """Input function: the plan, which is newer than any record, for a point that is not done; nothing for the others.

    The plan alone decides: a failed, stale or truncated record is made again, whatever Snakemake remembers.
    """

    def find(wildcards):
        job = JOBS[f"results/{wildcards.run}/records/{experiment}/{wildcards.job}.json"]
        return [] if job["state"] in ("done", "skipped") else [str(PLAN_FILE)]

    return find


for experiment, timed in PLAN["experiments"].items():

    rule:
        name:
            experiment
        input:
            unfinished(experiment),
        output:
            update(f"results/{{run}}/records/{experiment}/{{job}}.json"),  # the old one stays until the new one is there
        log:
            f"results/{{run}}/logs/{experiment}/{{job}}.log",
        conda:
            "../../environment.yml"
        threads: workflow.cores if timed else 1  # a timed point has the machine for itself
        params:
            arguments=arguments,
        shell:
            "repro run {params.arguments:q} --record-failure --out {output:q} > {log:q} 2>&1"
