// SPDX-License-Identifier: Apache-2.0
// The first calls into libraries that are not ours, made by one thread while it is alone.
//
// Such libraries find out at their first call what processor they run on, and not all of them take a lock for it. The
// vector mathematics behind torch's elementwise functions (sqrt, exp, tanh, ...) stores the processor's number twice,
// first as it was found and then translated; a second thread that reads it in between takes its function from the row
// of the table that is accurate to twelve bits. The workers' weights would then differ by chance, in one run of some
// thirty on processors with AVX-512.
#pragma once

#include "train/run.h"

namespace gradwire::train {

// One small forward and backward pass of the job's model on the CPU, and one call of the vector mathematics, on the
// calling thread. Nothing of it is kept. Throws as make_model() does.
void warm_up(const TrainingJob& job);

}  // namespace gradwire::train
