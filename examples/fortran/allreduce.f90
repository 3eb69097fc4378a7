! SPDX-License-Identifier: Apache-2.0
!
! The program of examples/c/allreduce_mpi.c in Fortran: a compressed all-reduce over MPI with error feedback.
!
!   mpif90 gradwire.f90 allreduce.f90 $(pkg-config --libs gradwire_mpi) -o allreduce
!   mpirun -n 4 ./allreduce
program allreduce
  use gradwire
  use mpi
  implicit none
  integer, parameter :: n = 100000, steps = 50
  real(c_float), target :: gradient(n), mean(n)
  real(c_double) :: sent(n), exact(n)
  type(c_ptr) :: plan, reducer
  integer(c_int64_t) :: step, bytes
  integer :: rank, ranks, i, p, ierr

  call MPI_Init(ierr)
  call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
  call MPI_Comm_size(MPI_COMM_WORLD, ranks, ierr)

  call check(gw_plan_open('onebit' // c_null_char, plan))
  call check(gw_plan_add(plan, 'layer.weight' // c_null_char, GW_F32, int(n, c_int64_t), 2_c_int))
  call check(gw_reducer_open_mpi(MPI_COMM_WORLD, 0d0, plan, reducer))
  call check(gw_reducer_set(reducer, 'seed' // c_null_char, '1' // c_null_char))
  gradient = [(real(sin(0.01d0 * i + rank), c_float), i = 0, n - 1)]
  sent = 0
  do step = 0, steps - 1
    call check(gw_reducer_run(reducer, step, [c_loc(gradient)], [c_loc(mean)]))
    sent = sent + mean
  end do
  call check(gw_reducer_get(reducer, 'message_bytes' // c_null_char, bytes))
  call gw_reducer_close(reducer)
  call gw_plan_close(plan)

  ! Error feedback sends later what compression left out, so the mean over all steps is close to the exact one.
  exact = 0
  do p = 0, ranks - 1
    exact = exact + [(sin(0.01d0 * i + p) / ranks, i = 0, n - 1)]
  end do
  exact = sent / steps - exact
  if (rank == 0) print '(a, i0, a, i0, a, es9.2)', 'onebit over ', ranks, ' ranks: ', bytes, &
    ' bytes per step; mean squared error ', sum(exact**2) / n
  call MPI_Finalize(ierr)
  if (sum(exact**2) / n > 0.005) error stop 1
end program
