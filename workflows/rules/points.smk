# Points: an allocation runs several, one after the other, as processes of this machine or, in a Slurm job, by srun.


rule allocation:
    input:
        PLAN_FILE,  # newer than whatever an earlier allocation of these points has written
    output:
        "results/{run}/done/{allocation}.json",
    log:
        "results/{run}/logs/{allocation}.log",
    wildcard_constraints:
        run=one_of([RUN]),
    priority: in_turn
    conda:
        "../../environment.yml"
    threads: cores
    resources:
        **submission(),
        **of_job(),
        trial=lambda wildcards, attempt: attempt,
    params:
        beginning=beginning,
    shell:
        "{params.beginning} repro allocation {input:q} {wildcards.allocation:q} --trial {resources.trial}"
        " --out {output:q} > {log:q} 2>&1"


rule points:
    input:
        lambda wildcards: made(PLAN["experiments"]),
    localrule: True


for experiment in sorted(PLAN["experiments"].keys() - PLAN["notebooks"].keys()):  # a name of both is the notebook's

    rule:
        name:
            experiment
        input:
            made([experiment]),
        localrule: True


if SLURM:
    check_jobs()

    onstart:
        if not hasattr(workflow.executor_settings, "requeue"):  # the local executor's
            raise WorkflowError(
                f"platform {PLAN['platform']}: its points are Slurm jobs; submit them with"
                " `snakemake --profile workflows/profiles/NAME` (docs/slurm.md)"
            )
        hear_of_ends(workflow.executor_settings.requeue)
        drive()

    onsuccess:
        end_driving()

    onerror:
        end_driving()

else:

    # A record that is asked for by its name. Nothing else depends on this rule: readers wait for allocations.
    rule point:
        input:
            unfinished,
        output:
            update("results/{run}/records/{experiment}/{job}.json"),  # the old one stays until the new one is there
        log:
            "results/{run}/logs/{experiment}/{job}.txt",
        wildcard_constraints:
            run=one_of([RUN]),
        priority: in_plan
        conda:
            "../../environment.yml"
        threads: workflow.cores
        shell:
            'repro allocation "$REPRO_PLAN" {output:q} > {log:q} 2>&1'
