# Scaling model: the three papers at their own sizes, predicted.


use rule zero_notebook as scaling_notebook with:
    input:
        notebook="notebooks/scaling.ipynb",
        claims="config/claims.yaml",
        records=records(
            "fabric_probe",
            "scaling_network",
            "scaling_step",
            "scaling_train",
            "scaling_map",
            "scaling_decode",
            "scaling_serving",
        ),
    output:
        html=report(
            "results/{run}/notebooks/scaling.html",
            category="Notebooks",
            caption="../report/notebook.rst",
        ),
        figures=report(pictures("scaling"), category="Scaling", caption="../report/figure.rst"),
    log:
        notebook="results/{run}/notebooks/scaling.ipynb",
        text="results/{run}/logs/notebook-scaling.log",
    params:
        records=record_folder,
        name="scaling",
        reader=PLAN["reader"],


rule scaling:
    input:
        expand(rules.scaling_notebook.output, run=RUN),


localrules:
    scaling,
