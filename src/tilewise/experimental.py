"""Gone: the experiment is answered, and its code is a study."""

raise ImportError("tilewise.experimental is now studies.accumulation, in a checkout of tilewise")
