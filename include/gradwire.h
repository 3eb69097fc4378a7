/* SPDX-License-Identifier: Apache-2.0
 *
 * The C interface: messages of a list of tensors, and a compressed all-reduce with error feedback. It is plain C99 over
 * opaque handles, so that C, Fortran and everything else that can call C can use it. docs/c-api.md has complete
 * programs. Tensors are in the memory of the host.
 *
 * Every function that returns an int returns GW_OK or one of the codes below, and gw_error() then says in words what
 * was wrong. No argument ends the process: null pointers, unknown codecs, sizes that do not fit and damaged messages
 * are refused. Outputs are undefined after a failure.
 *
 * Threads: the functions without a handle may be called by any number of threads at once. A plan belongs to one thread
 * at a time. A reducer belongs to the thread that opened it: its steps run inside gw_reducer_run(), on that thread, and
 * so do the callbacks of its communicator.
 */
#ifndef GRADWIRE_H
#define GRADWIRE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif

enum gw_status {
  GW_OK = 0,
  GW_USAGE = 1,       /* an argument is wrong */
  GW_MESSAGE = 2,     /* a message is truncated, altered, of another version, or malformed */
  GW_MISMATCH = 3,    /* ranks disagree about what they are about to do */
  GW_ENGINE = 4,      /* a peer stalled or died, or the communicator failed */
  GW_IO = 5,          /* a file could not be read or written */
  GW_UNSUPPORTED = 6, /* this build or this machine cannot do it */
  GW_DEVICE = 7,      /* a device call failed */
  GW_RESOURCE = 8,    /* no memory, or no thread */
  GW_INTERNAL = 9     /* a mistake in the library itself */
};

/* The types of elements; the numbers are those of the wire format. */
enum gw_dtype { GW_F32 = 0, GW_F16 = 1, GW_BF16 = 2 };

typedef struct gw_plan gw_plan;
typedef struct gw_reducer gw_reducer;

/* The version of the library, such as "0.1.0". */
const char* gw_version(void);

/* What the last failure on this thread was, in words; never null. The text may change with the next call on this
 * thread. */
const char* gw_error(void);

/* Records `text` for gw_error() and returns `code`: callbacks of a communicator say in this way why they failed. */
int gw_fail(int code, const char* text);

/* ---- Plans ---- */

/* Opens a plan, that is a list of tensors with a codec each. `codec` is a spec, such as "qsgd:bits=4", or rules, such
 * as "1d=fp32;*=qsgd:bits=4"; `gradwire codecs` lists the codecs. The list is empty at first. */
int gw_plan_open(const char* codec, gw_plan** plan);
void gw_plan_close(gw_plan* plan); /* null: nothing happens */

/* Adds a tensor. Names must differ, because the random bits of codecs and the residuals follow from them; the tensor of
 * a file that `gradwire encode` has made is named "". `dimensions` is for the rules `1d` and `2d`. */
int gw_plan_add(gw_plan* plan, const char* name, int dtype, uint64_t count, int dimensions);

/* The same for a matrix whose elements stand row after row; a tensor of more dimensions has its first one as rows and
 * all others as columns. A reducer with the codec "lowrank:rank=4", alone or in rules such as
 * "2d=lowrank:rank=4;*=fp32", needs to know both. There are no messages with this codec. */
int gw_plan_add_matrix(gw_plan* plan, const char* name, int dtype, uint64_t rows, uint64_t columns);

/* ---- Messages ---- */

/* Every codec that learns is fitted to its tensor, as `gradwire encode` does it; other codecs stay as they are.
 * tensors[i] are the elements of the tensor that was added as number i, here and below. */
int gw_plan_fit(gw_plan* plan, const void* const* tensors);

/* The exact size of the plan's messages. It depends on the codecs and on what they were fitted to, but not on the
 * values of a message. */
int gw_plan_bytes(gw_plan* plan, size_t* bytes);

/* Writes a message into `message`, where there is room for `room` bytes. The random bits of a codec follow from seed
 * and step. With one tensor named "" the bytes are those of `gradwire encode --seed SEED --step STEP`. */
int gw_encode(gw_plan* plan, const void* const* tensors, uint64_t step, uint64_t seed, void* message, size_t room,
              size_t* written);

/* Decodes a message into tensors[i], as elements of the plan's types. The message must have the tensors of the plan, by
 * names and counts. Its codecs are its own: a message says itself how it was encoded. Nothing is written if the message
 * is damaged. */
int gw_decode(gw_plan* plan, const void* message, size_t bytes, void* const* tensors);

/* What a message says of itself and of one of its tensors. The caller sets struct_bytes to sizeof(gw_info), so
 * that later versions of the library can add fields behind the last one. */
typedef struct gw_info {
  size_t struct_bytes;
  uint32_t tensors;     /* how many tensors the message has */
  int dtype;            /* the type of this tensor's elements when they were encoded */
  uint64_t count;       /* its elements */
  uint64_t step;        /* of the message */
  uint32_t rank, world; /* who sent it, and among how many ranks */
  char codec[256];      /* the spec, cut if it is longer */
} gw_info;

/* Fills in `info` for tensor number `tensor`, from 0 on. The head of the message is checked as a whole; gw_decode()
 * checks the rest. */
int gw_inspect(const void* message, size_t bytes, uint32_t tensor, gw_info* info);

/* ---- All-reduce ---- */

/* How ranks exchange bytes. exchange() sends send[p], of send_bytes[p] bytes, to every rank p and receives recv[p], of
 * recv_bytes[p] bytes, from it, and returns when both are done: 0, or gw_fail(GW_ENGINE, "why"). Sizes may be 0, and
 * those of this rank itself are. All ranks call it in the same order with sizes that fit. */
typedef struct gw_communicator {
  size_t struct_bytes; /* sizeof(gw_communicator) */
  int rank, size;
  void* context; /* given to the callbacks */
  int (*exchange)(void* context, const void* const* send, const size_t* send_bytes, void* const* recv,
                  const size_t* recv_bytes);
  void (*abandon)(void* context, const char* why); /* this rank has failed and will not call again; may be null */
  void (*close)(void* context);                    /* called by gw_reducer_close(); may be null */
  int node; /* above 0: ranks with the same number run on one node, for the option `nodes`; 0: not known. A
             * communicator that ends before this field, by struct_bytes, is accepted too. */
} gw_communicator;

/* Opens a reducer for the tensors and codecs of a plan, which are copied; what the plan was fitted to does not matter,
 * since a reducer lets its codecs learn. The communicator is copied too, and what its context points to must stay. If
 * opening fails, close() is not called. */
int gw_reducer_open(const gw_communicator* communicator, const gw_plan* plan, gw_reducer** reducer);
void gw_reducer_close(gw_reducer* reducer); /* null: nothing happens */

/* The same over MPI; in the library gradwire_mpi. `communicator` is a Fortran handle: MPI_Comm_c2f(comm) in C, and the
 * communicator itself in Fortran. Collective; the communicator is duplicated. MPI must be initialised, with any thread
 * level, and the reducer must be closed before MPI_Finalize. A peer that does not answer for `timeout` seconds is an
 * error that names its rank; 0 means 60 seconds. */
int gw_reducer_open_mpi(int communicator, double timeout, const gw_plan* plan, gw_reducer** reducer);

/* Options, before the first step and with the same values on all ranks:
 *   down            the codec of the way back; without it that of the way up, rounded to nearest where it can
 *   method          scatter (each rank reduces a part) or gather (each rank gets all messages)
 *   op              mean or sum
 *   feedback        codec (as the codec wants it), on or off: residuals of the ranks' own gradients
 *   owner_feedback  the same for the way back
 *   residual        f32 or bf16: the type of the residuals
 *   decay           above 0, to 1: what is left of an old residual when it is added
 *   seed, steps     whole numbers: of the random bits, and the length of the run for codecs that plan with it
 *   threads         of this rank, for encoding and decoding; 1 to 1024
 *   nodes           0 (one level), a number of nodes of equally many consecutive ranks, or auto: two levels, where
 *                   ranks of a node reduce plainly and only nodes exchange messages. auto finds ranks that share a
 *                   machine, over MPI or by the field `node` of the communicator
 * and, also between steps:
 *   rate            the learning rate, 0 or more, for codecs that follow it
 *   loss_scale      the factor that the gradients of the next steps carry
 */
int gw_reducer_set(gw_reducer* reducer, const char* option, const char* value);

/* Figures: message_bytes (what this rank sends to others in a step), node_bytes (what of it leaves the node; on one
 * level all of it), skipped (steps with results that were not finite: they change no residual). They exist after the
 * first step. */
int gw_reducer_get(gw_reducer* reducer, const char* figure, uint64_t* value);

/* One step, collective: in[i] is read and the result is written to out[i], for every tensor of the plan. They may be
 * the same memory, aligned as their type wants it. All ranks get the same bits. The first step compares tensors and
 * options of all ranks. If one rank's arguments are wrong, all ranks are told before data move, and can go on. */
int gw_reducer_run(gw_reducer* reducer, uint64_t step, const void* const* in, void* const* out);

/* Residuals and what codecs have learned, of this rank: a file for each rank. Loading is collective, and the run then
 * goes on bit for bit. */
int gw_reducer_save(gw_reducer* reducer, const char* path);
int gw_reducer_load(gw_reducer* reducer, const char* path);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif /* GRADWIRE_H */
