"""The one scorer: how good predictions are, and how sure one can be of that number.

- `judgement`: `score`, metrics of a predictive that is in memory; `rank` and `separation`, of decisions; the result and its text
- `scorers`: sums over batches, which become means with standard errors, for classes and for regression
- `stream`: `Judge`, which is given batch after batch, and `judge`, which runs it over data
"""

from dubito.evaluation.judge.judgement import Counts as Counts
from dubito.evaluation.judge.judgement import Decision as Decision
from dubito.evaluation.judge.judgement import Judgement as Judgement
from dubito.evaluation.judge.judgement import finite as finite
from dubito.evaluation.judge.judgement import rank as rank
from dubito.evaluation.judge.judgement import score as score
from dubito.evaluation.judge.judgement import separation as separation
from dubito.evaluation.judge.judgement import suitable as suitable
from dubito.evaluation.judge.stream import Judge as Judge
from dubito.evaluation.judge.stream import judge as judge
from dubito.evaluation.judge.stream import standard_errors as standard_errors
