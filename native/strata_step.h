/* One exported step of a Strata plan, trained on a device: no Python, no torch, no network code.
 *
 * A step is a folder that `strata export` wrote (docs/pocket.md): manifest.json, step.pte (the program: code and memory
 * plan, no weights) and weights.safetensors. Weights, gradients, momentum and samples are the library's or the caller's
 * own memory, so one program serves every round of a step.
 *
 * Functions that return int return STRATA_OK or one of the codes below; strata_step_error() then says in one sentence
 * what was wrong. A step is used by one thread at a time; several steps may be open at once.
 */
#ifndef STRATA_STEP_H
#define STRATA_STEP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STRATA_STEP_ABI 1 /* of this header; changes where a struct or a meaning does */

enum {
  STRATA_OK = 0,
  STRATA_FAILED = 1,    /* the runtime could not do it: a missing operator, no memory, a file that cannot be read */
  STRATA_BAD_INPUT = 2, /* what was given does not fit: a damaged file, wrong sizes, a label out of range */
  STRATA_STOPPED = 3    /* the caller's progress function asked for it; parameters are as the last step left them */
};

typedef struct strata_step strata_step;

/* The manifest's three lists of tensors. Each is one flat row of float32: the tensors one after another, in the
 * manifest's order, each in C order. */
enum {
  STRATA_TRAINED = 0, /* manifest "trained": what training changes, and what an update holds */
  STRATA_FROZEN = 1,  /* manifest "frozen": parameters that training reads */
  STRATA_BUFFERS = 2  /* manifest "buffers": running statistics of batch norms, which evaluation reads */
};

/* What strata_step_bytes counts. ARENA is the program's: all activations and, unless they are summed over parts, the
 * gradients. TOTAL is what the plan's `peak` is about. Frozen weights of a file are mapped, and still counted. */
enum {
  STRATA_BYTES_ARENA = 0,
  STRATA_BYTES_WEIGHTS = 1,   /* trained, frozen and buffers */
  STRATA_BYTES_GRADIENTS = 2, /* sums over the parts of a batch; 0 where a batch is one part */
  STRATA_BYTES_MOMENTUM = 3,
  STRATA_BYTES_BATCH = 4, /* a part's inputs and labels as the network takes them; those that wait are the caller's */
  STRATA_BYTES_TOTAL = 5,
  STRATA_BYTES_SCRATCH = 6 /* of the kernels (at most some 100 KiB a thread) and the runtime's tables: not in TOTAL */
};

enum { STRATA_UINT8 = 0, STRATA_FLOAT32 = 1, STRATA_INT64 = 2 };

/* Samples are read where they are: nothing is copied but the batch under way. */
typedef struct {
  int64_t count;
  const void* inputs;    /* [count, ...the manifest's input shape] */
  int32_t kind;          /* STRATA_UINT8: images, scaled to 0..1 and normalised here; STRATA_FLOAT32 and STRATA_INT64:
                            as the network takes them (the manifest's input dtype) */
  int32_t channels;      /* of stored uint8 images: 0, as the network's; 1, grey: every channel gets it */
  const int64_t* labels; /* [count], 0 to classes - 1 */
} strata_samples;

typedef struct {
  int32_t epochs;
  int32_t batch;       /* 0: the manifest's */
  int32_t micro_batch; /* samples of a batch at a time; 0: the manifest's. Not above the manifest's */
  float lr;
  float momentum;
  float weight_decay;
  float proximal;             /* FedProx's mu; 0: none */
  float clip;                 /* the gradients of a step are scaled down to this L2 norm; 0: none */
  const int64_t* order;       /* [epochs * count] sample indices; NULL: torch.randperm's, from order_seed */
  uint64_t order_seed;        /* as torch.Generator().manual_seed takes them: a task's seeds, as Strata draws them */
  uint64_t augmentation_seed;
  uint64_t dropout_seed;
  const char* augmentation;   /* of uint8 images: none, cifar, cifar-vflip, pictures, pictures-vflip; NULL: none */
  const float* mean;          /* of each channel, for uint8 images; NULL: none */
  const float* std;
  /* after every batch; anything but 0 ends training with STRATA_STOPPED. NULL: none */
  int (*progress)(void* context, int64_t batch, int64_t batches, double loss);
  void* context;
} strata_training;

typedef struct {
  double loss;        /* mean over the samples trained on, each before its step; NaN stays NaN */
  int64_t batches;
  int64_t bytes;      /* STRATA_BYTES_TOTAL of this training */
} strata_trained;

typedef struct {
  double loss_sum; /* cross-entropy, over the samples */
  int64_t correct;
  int64_t samples;
} strata_scores;

/* STRATA_STEP_ABI of the library. */
int strata_step_abi(void);

/* What went wrong last in this thread: one sentence, never NULL, valid until the thread's next call. */
const char* strata_step_error(void);

/* Opens a step folder. Sizes and checksums are checked; weights.safetensors is loaded where it is there: trained weights
 * and buffers are copied, frozen ones stay mapped from the file. NULL: strata_step_error says why. */
strata_step* strata_step_open(const char* folder);

/* The same from memory, without weights (they are zeros). The text of the manifest is copied; the program is not: it
 * has to stay as it is until the step is closed. */
strata_step* strata_step_open_memory(const char* manifest, size_t manifest_size, const void* program,
                                     size_t program_size);

/* From a safetensors file with all tensors of the manifest, by name. */
int strata_step_load(strata_step* step, const char* weights);

/* The manifest's text as it was read (JSON, UTF-8). */
const char* strata_step_manifest(const strata_step* step);

/* How many float32 a list has; -1 for a list that there is none of. */
int64_t strata_step_size(const strata_step* step, int list);

/* Into the step, and out of it. `count` has to be strata_step_size's. */
int strata_step_write(strata_step* step, int list, const float* values, int64_t count);
int strata_step_read(const strata_step* step, int list, float* values, int64_t count);

/* STRATA_FROZEN from memory that stays the caller's (a mapped file, say), until it is given another or closed. */
int strata_step_lend(strata_step* step, const float* frozen, int64_t count);

/* Some epochs of SGD, from fresh momentum; what it trained is read with strata_step_read. On a failure parameters are as
 * the last whole step left them. `found` may be NULL. */
int strata_step_train(strata_step* step, const strata_samples* samples, const strata_training* training,
                      strata_trained* found);

/* Scores with STRATA_BUFFERS as batch norms' statistics and dropout off, or (`own_statistics`) with each batch's own.
 * `batch`: samples at a time, 0 or above the manifest's: that. `mean`, `std`: as in training. `scores`: NULL, or room
 * for [count, classes] float32. */
int strata_step_evaluate(strata_step* step, const strata_samples* samples, int32_t batch, int own_statistics,
                         const float* mean, const float* std, strata_scores* found, float* scores);

/* The batch norms' statistics of these samples as one batch, in the order and size of STRATA_BUFFERS (means, and
 * variances over n - 1, as torch's running ones): at most the manifest's micro-batch of samples. Counters of batches
 * are no part of it. Dropout is off. The step's own buffers stay as they are: strata_step_write puts them in. */
int strata_step_statistics(strata_step* step, const strata_samples* samples, const float* mean, const float* std,
                           float* buffers, int64_t count);

int64_t strata_step_bytes(const strata_step* step, int which);

void strata_step_close(strata_step* step); /* NULL is welcome */

#ifdef __cplusplus
}
#endif
#endif
