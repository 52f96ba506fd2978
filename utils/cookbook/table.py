def results_table(outcomes, wide=False):
    return str([(o.recipe, o.state, o.why, len(o.rows)) for o in outcomes])
